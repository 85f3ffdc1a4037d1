"""The weight cache daemon: it holds generations for engines that come and go, and exports what the journal knows.

It imports neither torch nor an engine and never touches a weight's bytes: it passes descriptors. Whoever loads weights
(an engine after a miss, or a load worker started here) publishes them; everything published is stored with the keeper
before it counts, so that the next daemon adopts it without reading a shard.
"""

import argparse
import asyncio
import contextlib
import fcntl
import os
import resource
import signal
import socket
import stat
import sys
import time
from pathlib import Path
from typing import Final

from weightcache import paths
from weightcache.errors import ConfigError, ResourceError, WeightCacheError
from weightcache.journal import Journal, boot_id
from weightcache.process import Process, Stat
from weightcache.registry import Registry
from weightcache.residency import Residency
from weightcache.sdnotify import Notifier, listen_fds
from weightcache.server import Server
from weightcache.telemetry import Telemetry

_TELEMETRY_EVERY_S: Final = 0.2


def _bind(path: Path) -> socket.socket:
    """Bind the socket; the caller holds the lock, so whatever is there belongs to no living daemon."""
    with contextlib.suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if not stat.S_ISSOCK(mode):
            raise ConfigError(
                "name_taken",
                f"{path} is in the way",
                expected="a socket, or nothing",
                found=stat.filemode(mode),
                remedy="Move it away or choose another --socket",
            )
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.bind(os.fspath(path))  # its folder is 0700, so the socket is private from its first moment
    path.chmod(0o600)
    return listener


def lock(path: Path) -> int:
    """Own a socket's name for as long as the returned descriptor is open.

    Raises:
        ResourceError: detail ``name``: another daemon holds it.
    """
    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 32, 0).decode().strip() or "unknown"
        os.close(descriptor)
        raise ResourceError(
            f"another weight cache daemon owns {path}",
            detail="name",
            found=f"pid {holder}",
            remedy="Use it, stop it, or choose another --socket",
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


def _start_ticks() -> int:
    stat_ = Stat.read(os.getpid())
    assert stat_ is not None
    return stat_.start_ticks


def _engine(pid: int) -> Process:
    process = Process.open(pid)
    if process is None:
        raise ConfigError("until_pid", f"there is no process {pid} to end with", remedy="Leave --until-pid out")
    return process


def _raise_descriptor_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _keep_telemetry(telemetry: Telemetry) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await loop.run_in_executor(None, telemetry.step)
        await asyncio.sleep(_TELEMETRY_EVERY_S)


async def run(options: argparse.Namespace) -> None:
    """Run a daemon with parsed options until SIGTERM, SIGINT or the end of ``--until-pid``."""
    began = time.monotonic()
    handed = listen_fds()
    path = paths.checked_socket_path(Path(options.socket)) if options.socket else paths.socket_path()
    paths.private_dir(path.parent)
    held = lock(path)
    _raise_descriptor_limit()
    journal = Journal(options.journal or paths.journal_path(), checkpoints=True)
    notifier = Notifier.from_environment()
    instance = os.urandom(8).hex()
    residency = Residency(Registry(options.capacity), journal, notifier, instance)
    listener = next((socket.socket(fileno=descriptor) for name, descriptor in handed if name == "listen"), None)
    server = Server(path, listener or _bind(path), residency, instance, frozenset({os.getuid(), *options.allow_uid}))
    telemetry = Telemetry(journal, residency.registry, options.metrics, options.spans)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, server.store_everything)
    if options.until_pid:
        loop.add_reader(_engine(options.until_pid), stop.set)
    residency.adopt(handed)
    for name, descriptor in handed:
        if name.startswith("lease-"):
            server.adopt_lease(name, descriptor)
    if listener is None:
        server.store_everything()
    server.start()
    _journal_start(residency, began)
    notifier.ready(f"serving {len(residency.registry.generations)} generations")
    telemetry.start()
    keeping = asyncio.create_task(_keep_telemetry(telemetry))
    try:
        await stop.wait()
    finally:
        # What others wait for is given back before telemetry is flushed.
        notifier.stopping()
        await server.stop()
        if not notifier.active:
            path.unlink(missing_ok=True)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        journal.append("process", "exited", {"process": "daemon", "pid": os.getpid(), "exit_code": 0})
        telemetry.close()
        journal.close()
        os.close(held)


def _journal_start(residency: Residency, began: float) -> None:
    registry, journal = residency.registry, residency.journal
    losses = registry.learn_losses(journal.query("WHERE kind IN ('publish', 'release') ORDER BY id"), boot_id())
    facts = {
        "process": "daemon",
        "pid": os.getpid(),
        "start_ticks": _start_ticks(),
        "generations": list(registry.generations),
        "leases": registry.leases,
        "losses": {loss.generation: loss.detail for loss in losses},
        "seconds": round(time.monotonic() - began, 6),
    }
    journal.append("process", "readopted" if registry.generations else "started", facts)


def parser() -> argparse.ArgumentParser:
    """The daemon's options; `readmit cache serve` takes the same."""
    options = argparse.ArgumentParser(prog="readmit cache serve", description=__doc__.split("\n")[0] if __doc__ else "")
    options.add_argument("--socket", help="where to listen (default: cache.sock in the runtime folder)")
    options.add_argument("--metrics", default="127.0.0.1:9464", help="HOST:PORT of /metrics")
    options.add_argument("--capacity", type=size, help="limit of resident bytes, such as 120GiB (default: none)")
    options.add_argument("--journal", type=Path, help="the journal (default: in the state folder)")
    options.add_argument("--spans", type=Path, help="OTLP-JSON lines file (default: spans.jsonl beside the journal)")
    options.add_argument("--allow-uid", type=int, action="append", default=[], help="a further uid that may connect")
    options.add_argument("--until-pid", type=int, help="end when this process ends")
    options.add_argument("--log-format", choices=("text", "json"), default="text")
    return options


def size(text: str) -> int:
    """Bytes from text such as ``120GiB``, ``4GB`` or ``1048576``."""
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    units |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
    number = text.strip().rstrip("BKMGTIbkmgti")
    unit = text.strip()[len(number) :].upper()
    try:
        return int(float(number) * units[unit])
    except (KeyError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 120GiB, 4GB or bytes") from error


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    from weightcache.logs import configure  # not at the top: it needs the options' format first

    configure(options.log_format)
    try:
        asyncio.run(run(options))
    except WeightCacheError as error:
        print(f"readmit cache serve: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
