"""A node as the keeper is to run it: what goes into its spec, what must be true before it starts."""

import contextlib
import errno
import json
import os
import shutil
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NoReturn

from readmit.config import Config, Slot, split_address
from readmit.gate import huge_pages
from readmit.gate.settings import GateSettings
from weightcache import paths
from weightcache.errors import ConfigError
from weightcache.journal.owner import check_owner
from weightcache.keeper.preloaded import socket_of
from weightcache.keeper.spec import STOP_S, ChildSpec, KeeperSpec, keeper_command
from weightcache.keeper.state import check_paths, check_unowned, read, spec_path
from weightcache.log_line import VARIABLE, chosen
from weightcache.process import Process
from weightcache.slo import KEPT_DAYS

GATE_STOP_S: Final = GateSettings.drain_notice_s + GateSettings.drain_limit_s + STOP_S
"""How long a gate may take to end: it serves on until load balancers know, then lets requests finish."""


def keeper_spec(config: Config) -> KeeperSpec:
    """The processes of a node: weight cache daemon, engines, gate."""
    return KeeperSpec(
        node=config.node.name,
        runtime_dir=config.node.runtime_dir,
        state_dir=config.node.state_dir,
        journal=config.journal,
        children=tuple(_children(config)),
        closes_episodes=not config.gate.enabled,
    )


def _children(config: Config) -> Iterator[ChildSpec]:
    env = {"WEIGHTCACHE_SOCKET": str(config.socket), "PATH": search_path()}
    if config.cache.enabled:
        yield ChildSpec("daemon", "daemon", daemon_command(config), env)
    for slot in config.slot:
        yield from engine(slot, env, config.node.runtime_dir)
    if config.gate.enabled and config.slot:
        settings = config.gate_settings()
        stop_s = settings.drain_notice_s + settings.drain_limit_s + STOP_S
        yield ChildSpec("gate", "gate", _gate_command(config), env | huge_pages.ENVIRONMENT, stop_s=stop_s)


def check_gate(settings: GateSettings) -> None:
    """Find out before a gate starts which of its files it could not use.

    Raises:
        ConfigError: ``probes``, ``token`` or ``tls``.
    """
    from readmit.gate import certificate  # not at the top: only those who start a gate pay for them
    from readmit.gate.access import read_token

    check_probes(settings.probes, settings.unverified_ok)
    if settings.token_file is not None:
        read_token(settings.token_file)
    certificate.check(settings)


def check_probes(probes: Path | None, unverified_ok: bool) -> None:
    """Raises ConfigError ``probes``, or what `ProbeSet.load` raises, when a gate would never open."""
    if probes is None and not unverified_ok:
        raise ConfigError(
            "probes",
            "the gate has no golden answers, so it would never open",
            expected="a probe file (--probes, or probes in [gate])",
            found="none",
            remedy="Record one from a good load (readmit probe record), or accept unverified traffic (unverified_ok)",
        )
    if probes is None:
        return
    files = sorted(probes.glob("*.json")) if probes.is_dir() else [probes] if probes.is_file() else []
    if not files:
        raise ConfigError(
            "probes",
            f"no probe file is in {probes}" if probes.is_dir() else f"the probe file {probes} is not there",
            remedy="Record it from a good load: readmit probe record URL --out FILE",
            path=str(probes),
        )
    from readmit.probes import ProbeSet  # not at the top: only those who start a gate pay for it

    for file in files:
        ProbeSet.load(file)


def engine(slot: Slot, env: dict[str, str], runtime_dir: Path) -> Iterator[ChildSpec]:
    """The child that runs a slot's engine, and the one that its restarts are forked from, if it has one."""
    environment, cwd = {**env, **slot.env}, str(slot.cwd) if slot.cwd else None
    resident = f"{slot.name}-preload" if slot.preload else None
    yield ChildSpec(
        name=slot.name,
        role="engine",
        argv=slot.argv,
        env=environment,
        cwd=cwd,
        model=slot.model,
        backoff_s=slot.backoff_s,
        limit=slot.limit,
        window_s=slot.window_s,
        stop_s=slot.stop_s,
        preload=resident,
    )
    if slot.preload and resident:
        interpreter = slot.argv[: slot.argv.index(slot.preload)]
        options = ("weightcache.preload", "--socket", str(socket_of(runtime_dir, resident)), slot.preload)
        yield ChildSpec(resident, "other", (*interpreter, *options), environment, cwd)


def search_path() -> str:
    """The ``PATH`` of the node's processes: this one's, and last the folder of ``readmit`` itself."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])


def daemon_command(config: Config) -> tuple[str, ...]:
    """How the weight cache daemon of a node is run."""
    options = ["--socket", str(config.socket), "--metrics", config.cache.metrics]
    if config.cache.capacity is not None:
        options += ["--capacity", str(config.cache.capacity)]
    if config.telemetry.spans is not None:
        options += ["--spans", str(config.telemetry.spans)]
    if config.telemetry.journal_days != KEPT_DAYS:
        options += ["--journal-days", str(config.telemetry.journal_days)]
    if config.slo:
        options += ["--slo", json.dumps(config.slo)]
    for uid in config.cache.allow_uid:
        options += ["--allow-uid", str(uid)]
    return (sys.executable, "-m", "weightcache.daemon", *options)


def _gate_command(config: Config) -> tuple[str, ...]:
    file = ["--config", str(config.file)] if config.file else []
    return (sys.executable, "-m", "readmit.gate", *file)


def check(spec: KeeperSpec, addresses: dict[str, str]) -> None:
    """Find out before anything starts what could not work.

    Args:
        spec: what is to run.
        addresses: what will be listened on, ``HOST:PORT`` by the name of its process. One whose process already runs
            here, left by a keeper that died, is in use rightly.

    Raises:
        ConfigError: ``already_running``, ``journal_owned``, ``command_not_found``, ``port_taken``, ``address``,
            ``not_private`` or ``path_too_long``.
    """
    check_paths(spec.runtime_dir, [child.name for child in spec.children])
    for folder in (spec.runtime_dir, spec.state_dir):
        if folder.exists():
            paths.private_dir(folder)
    check_unowned(spec.runtime_dir)
    check_owner(spec.journal, spec.node)
    for child in spec.children:
        _check_command(child)
    alive = set(_living(spec.runtime_dir))
    listening: dict[str, str] = {}
    for name, address in addresses.items():
        other = listening.setdefault(address, name)
        if other != name and split_address(address)[1] != 0:
            raise ConfigError(
                "port_taken",
                f"{other} and {name} cannot both listen on {address}",
                remedy="Give each its own port in the configuration",
                address=address,
                process=name,
            )
        if name not in alive:
            _check_address(name, address)


def become_keeper(spec: KeeperSpec, log_format: str | None = None) -> NoReturn:
    """Replace this process by the keeper.

    Args:
        spec: what is to run.
        log_format: of the logs of all its processes; what the environment says if None.

    Raises:
        ConfigError: the runtime or state folder, or the log format, cannot be used.
    """
    os.environ[VARIABLE], os.environ["READMIT_NODE"] = chosen(log_format), spec.node
    file = spec_path(paths.private_dir(spec.runtime_dir))
    paths.private_dir(spec.state_dir)  # the keeper makes it too, but refuses later, with its spec left behind
    spec.save(file)
    sys.stdout.flush()
    os.execv(sys.executable, keeper_command(file))


def renewed_spec(config: Config, running: Iterable[str]) -> KeeperSpec:
    """What a keeper that runs is to go on with by a configuration that may have changed.

    Args:
        config: the configuration.
        running: roles of what it runs; others run elsewhere.

    Raises:
        ConfigError: ``command_not_found``, ``cwd``, ``path_too_long``.
    """
    spec = keeper_spec(config)
    roles = {*running, "other"}
    spec = spec._replace(children=tuple(child for child in spec.children if child.role in roles))
    check_paths(spec.runtime_dir, [child.name for child in spec.children])
    for child in spec.children:
        _check_command(child)
    return spec


@contextlib.contextmanager
def spec_in_place(spec: KeeperSpec) -> Iterator[None]:
    """Put a spec where a running keeper's is, and its own back if the block fails."""
    file = spec_path(spec.runtime_dir)
    before = file.read_bytes()
    spec.save(file)
    try:
        yield
    except BaseException:
        file.write_bytes(before)
        raise


def _living(runtime_dir: Path) -> Iterator[str]:
    for record in read(runtime_dir)[1]:
        process = Process.open(record.pid, record.start_ticks) if record.pid else None
        if process is not None:
            process.close()
            yield record.name


def _check_command(child: ChildSpec) -> None:
    folder = Path(child.cwd) if child.cwd else Path.cwd()
    program, path = child.argv[0], child.env.get("PATH", search_path())
    found = shutil.which(folder / program) if os.sep in program else shutil.which(program, path=path)
    if found is None:
        raise ConfigError(
            "command_not_found",
            f"the command of {child.name} cannot be run: there is no program {program}",
            expected="an executable file" if os.sep in program else f"an executable in one of {path}",
            found=_what_is_there(folder / program) if os.sep in program else "none",
            remedy=f"Install it, or give its full path in the command of {child.name}",
            command=list(child.argv),
        )
    if not folder.is_dir():
        raise ConfigError(
            "cwd",
            f"the folder {folder} in which {child.name} is to run is not there",
            remedy="Make it, or name another cwd",
        )


def _what_is_there(path: Path) -> str:
    if path.is_dir():
        return "a folder"
    return "a file that may not be executed" if path.exists() else "none"


def _check_address(name: str, address: str) -> None:
    host, port = split_address(address)
    if port == 0:
        return
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, target in found[:1]:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(target)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        raise ConfigError(
            "port_taken" if taken else "address",
            f"{name} cannot listen on {address}: {error.strerror}",
            remedy="End the process that listens there (ss -ltnp shows it), or choose another address"
            if taken
            else "Choose an address of this machine that this user may listen on",
            address=address,
            process=name,
        ) from error


def addresses(config: Config) -> dict[str, str]:
    """What a node's processes will listen on, by their names."""
    known: Sequence[tuple[str, str, bool]] = (
        ("daemon", config.cache.metrics, config.cache.enabled),
        ("gate", config.gate.listen, config.gate.enabled and bool(config.slot)),
        *((slot.name, slot.address, True) for slot in config.slot if slot.address),
    )
    return {name: address for name, address, enabled in known if enabled}
