"""The weight cache daemon: it holds generations for engines that come and go, and exports what the journal knows.

It imports neither torch nor an engine and never touches a weight's bytes: it passes descriptors. Whoever loads weights
(an engine after a miss, or a load worker started here) publishes them; everything published is stored with the keeper
before it counts, so that the next daemon adopts it without reading a shard.
"""

import argparse
import asyncio
import contextlib
import gc
import logging
import math
import os
import resource
import signal
import socket
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Final, NamedTuple

from weightcache import paths
from weightcache.deposit import Deposit
from weightcache.errors import ConfigError, ResourceError, WeightCacheError
from weightcache.forecast import Forecast
from weightcache.frames import NOBODY
from weightcache.gpu_watch import Finding, GpuWatch, NvmlError
from weightcache.journal import Journal, boot_id
from weightcache.journal.owner import own
from weightcache.lock_file import Held, hold
from weightcache.log_line import FORMATS
from weightcache.logs import complain, configure
from weightcache.process import Process, Stat
from weightcache.recollection import recall
from weightcache.registry import Registry
from weightcache.residency import Residency
from weightcache.sdnotify import STORE_MAX, Notifier, listen_fds
from weightcache.server import BACKLOG, Server
from weightcache.sizes import parse_size
from weightcache.slo import KEPT_DAYS, Objectives
from weightcache.telemetry import Telemetry

_TELEMETRY_EVERY_S: Final = 0.2
_AFTER_FAULT_S: Final = 30
_ALIVE_EVERY_S: Final = 1.0
_MANY: Final = 0.75
"""This part of a limit of descriptors is worth a warning."""
_log: Final = logging.getLogger("weightcache.daemon")


def _bind(path: Path) -> socket.socket:
    """Bind the socket; the caller holds the lock, so a socket of ours that is there belongs to no living daemon.

    Raises:
        ResourceError: detail ``name``: something else is there. It is left alone.
    """
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
            raise ResourceError(
                f"{path} is in the way",
                detail="name",
                expected=f"a socket of uid {os.geteuid()}, or nothing",
                found=f"{stat.filemode(status.st_mode)} of uid {status.st_uid}",
                remedy="Move it away or choose another --socket",
            )
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    os.fchmod(listener.fileno(), 0o600)  # before it has a name, so that its file is never anybody else's to open
    listener.bind(os.fspath(path))
    listener.listen(BACKLOG)  # from now on clients wait, instead of finding a socket that nobody listens on
    return listener


def _unbind(path: Path, bound: int) -> None:
    """Remove the socket, unless its name is another's by now: somebody may have removed our files, lock and all."""
    with contextlib.suppress(FileNotFoundError):
        if path.lstat().st_ino == bound:
            path.unlink()


def lock(path: Path) -> int:
    """Own a socket's name for as long as the returned descriptor is open.

    Raises:
        ResourceError: detail ``name``: another daemon holds it, or there can be no lock.
    """
    try:
        return hold(Path(f"{path}.lock"), str(os.getpid()))
    except Held as held:
        raise ResourceError(
            f"another weight cache daemon owns {path}",
            detail="name",
            found=f"pid {held.holder or 'unknown'}",
            remedy="Use it, stop it, or choose another --socket",
        ) from held
    except OSError as error:
        raise ResourceError(
            f"{path}.lock cannot be held: {error.strerror}",
            detail="name",
            remedy="Move it away or choose another --socket",
        ) from error


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
    while True:
        try:
            await asyncio.to_thread(telemetry.step)
        except Exception:  # noqa: BLE001 - a fault of the exporter must not take the weights along
            _log.exception("telemetry failed; it goes on in %d s", _AFTER_FAULT_S)
            await asyncio.sleep(_AFTER_FAULT_S)
        await asyncio.sleep(_TELEMETRY_EVERY_S)


async def _keep_alive(notifier: Notifier) -> None:
    while True:
        notifier.alive()
        await asyncio.sleep(_ALIVE_EVERY_S)


def count_descriptors(handed: int) -> None:
    """Say how many descriptors are open and were handed over, and that they are many before they are too many."""
    kept = os.environ.get("FDSTORE", "")
    counts = (
        (len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)[0], "open", "LimitNOFILE"),
        (handed, int(kept) if kept.isdecimal() else STORE_MAX, "in keeping", "FileDescriptorStoreMax"),
    )
    for count, limit, what, setting in counts:
        if count > _MANY * limit:
            advice = f"beyond {limit} no weights can be taken in; raise {setting} (systemd), or use larger chunks"
            _log.warning("%d descriptors are %s: %s", count, what, advice)
        else:
            _log.info("%d of %d descriptors are %s", count, limit, what)


class _Handed(NamedTuple):
    """What the keeper kept for this daemon, by kind."""

    listener: socket.socket | None
    generations: list[tuple[str, int]]
    leases: list[tuple[str, int]]

    @classmethod
    def sort(cls, handed: list[tuple[str, int]], path: Path, deposit: Deposit) -> "_Handed":
        """Take what is ours, and give up the rest: a listener of another path, or one whose path is gone."""
        listener: socket.socket | None = None
        generations, leases = [], []
        for name, descriptor in handed:
            kind = name.partition("-")[0]
            if kind in ("manifest", "arena"):
                generations.append((name, descriptor))
            elif kind == "lease":
                leases.append((name, descriptor))
            elif name == "listen" and listener is None and _listens_at(path, descriptor):
                listener = socket.socket(fileno=descriptor)
            else:
                deposit.remove([name])
                os.close(descriptor)
        return cls(listener, generations, leases)


def _listens_at(path: Path, descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as stored:
        return stored.getsockname() == os.fspath(path) and path.is_socket()


def _watch_gpus(residency: Residency, loop: asyncio.AbstractEventLoop, stop: threading.Event) -> None:
    """Watch this machine's GPUs, if it has any, in a thread of its own."""

    def report(finding: Finding) -> None:
        loop.call_soon_threadsafe(residency.lose, finding.uuid, finding.detail, finding.message)

    watch = GpuWatch(report)
    try:
        watch.start()
    except NvmlError as error:
        if error.reason != "missing":
            _log.warning("GPUs are not watched: %s", error)
        return
    threading.Thread(target=watch.run, args=(stop,), name="gpu-watch", daemon=True).start()


async def run(options: argparse.Namespace) -> None:
    """Run a daemon with parsed options until SIGTERM, SIGINT or the end of ``--until-pid``.

    Raises:
        ConfigError: an option cannot work, or the journal is another node's; nothing was touched.
        ResourceError: detail ``name``: another daemon owns the socket.
    """
    began = time.monotonic()
    handed = listen_fds()
    path = paths.checked_socket_path(Path(options.socket)) if options.socket else paths.socket_path()
    paths.private_dir(path.parent)
    engine = _engine(options.until_pid) if options.until_pid is not None else None
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, lock(path))
        _raise_descriptor_limit()
        count_descriptors(len(handed))
        journal_path = options.journal or paths.journal_path()
        journal = Journal(journal_path, checkpoints=True)
        if (owned := own(journal_path, journal.context.node)) is not None:
            stack.callback(os.close, owned)
        stack.callback(journal.close)
        registry = Registry(options.capacity)
        forecast = Forecast(registry)
        telemetry = Telemetry(
            journal,
            registry,
            options.metrics,
            options.spans,
            objectives=options.slo,
            forecast=forecast,
            kept_days=options.journal_days,
        )
        telemetry.start()
        stack.callback(telemetry.close)
        deposit = Deposit(Notifier.from_environment())
        stack.callback(deposit.close)
        residency = Residency(registry, journal, deposit, os.urandom(8).hex())
        await _serve(path, handed, residency, (telemetry, forecast), options.allow_uid, engine, began)


async def _serve(
    path: Path,
    handed: list[tuple[str, int]],
    residency: Residency,
    watching: tuple[Telemetry, Forecast],
    allowed: list[int],
    engine: Process | None,
    began: float,
) -> None:
    deposit, journal = residency.deposit, residency.journal
    kept = _Handed.sort(handed, path, deposit)
    past = recall(journal)
    residency.adopt(kept.generations, past, boot_id())
    listener = kept.listener or _bind(path)
    bound = path.stat().st_ino  # noqa: ASYNC240 - nobody is served yet
    server = Server(path, listener, residency, frozenset({os.geteuid(), *allowed}))
    for name, descriptor in kept.leases:
        server.adopt_lease(name, descriptor, past.leases.get(name))
    stop, stop_watching = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, server.store_everything)
    if engine is not None:
        loop.add_reader(engine, stop.set)
    if kept.listener is None:
        server.store_everything()
    server.start()
    deposit.notifier.ready("serving")
    gc.freeze()  # a full collection of what a start leaves would hold a scrape up; not one first, for engines wait
    _journal_start(residency, began)
    _watch_gpus(residency, loop, stop_watching)
    telemetry, forecast = watching
    _log.info("serving at %s, metrics on port %s", path, telemetry.port)
    tasks = (_keep_alive(deposit.notifier), _keep_telemetry(telemetry), forecast.keep())
    keeping = [asyncio.create_task(task) for task in tasks]
    try:
        await stop.wait()
    finally:
        # What others wait for is given back before telemetry is flushed.
        deposit.notifier.stopping()
        stop_watching.set()
        await server.stop()
        listener.close()
        if not deposit.active:
            _unbind(path, bound)
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
        journal.append("process", "exited", {"process": "daemon", "pid": os.getpid(), "exit_code": 0})


def _journal_start(residency: Residency, began: float) -> None:
    registry = residency.registry
    facts = {
        "process": "daemon",
        "pid": os.getpid(),
        "start_ticks": _start_ticks(),
        "generations": list(registry.generations),
        "leases": registry.leases,
        "lease_names": [name for generation in registry.generations.values() for name in generation.leases],
        "losses": {loss.generation: loss.detail for loss in registry.losses},
        "seconds": round(time.monotonic() - began, 6),
    }
    residency.journal.append("process", "readopted" if registry.generations else "started", facts)


def parser() -> argparse.ArgumentParser:
    """The daemon's options; `readmit cache serve` takes the same."""
    options = argparse.ArgumentParser(prog="readmit cache serve", description=__doc__.split("\n")[0] if __doc__ else "")
    options.add_argument("--socket", help="where to listen (default: cache.sock in the runtime folder)")
    options.add_argument("--metrics", default="127.0.0.1:9464", help="HOST:PORT of /metrics")
    options.add_argument("--capacity", type=_size, help="limit of resident bytes, such as 120GiB (default: none)")
    options.add_argument("--journal", type=_file, help="the journal (default: in the state folder)")
    options.add_argument("--spans", type=_file, help="OTLP-JSON lines file (default: spans.jsonl beside the journal)")
    options.add_argument(
        "--slo",
        type=_objectives,
        metavar="JSON",
        help="promises that differ from the defaults, as [slo] in readmit.toml",
    )
    options.add_argument(
        "--journal-days",
        type=_days,
        default=KEPT_DAYS,
        help=f"how long events stay in the journal (default: {KEPT_DAYS})",
    )
    options.add_argument("--allow-uid", type=_uid, action="append", default=[], help="a further uid that may connect")
    options.add_argument("--until-pid", type=_pid, help="end when this process ends")
    options.add_argument("--log-format", choices=FORMATS, help="of the log (default: $READMIT_LOG_FORMAT, or text)")
    return options


def _file(text: str) -> Path:
    if not Path(text).name:
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a file")
    return Path(text)


def _number(text: str, least: int, most: int) -> int:
    if not text.isdecimal() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {most}")
    return int(text)


def _pid(text: str) -> int:
    return _number(text, 1, (1 << 22) - 1)


def _uid(text: str) -> int:
    uid = _number(text, 0, (1 << 32) - 2)
    if uid == NOBODY:
        raise argparse.ArgumentTypeError(f"{NOBODY} is what any uid unknown to a user namespace looks like: who is it?")
    return uid


def _objectives(text: str) -> Objectives:
    try:
        return Objectives.parse(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = 0.0
    if not 1 <= days < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days from 1")
    return days


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        configure(options.log_format)
        asyncio.run(run(options))
    except WeightCacheError as error:
        complain("readmit cache serve", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
