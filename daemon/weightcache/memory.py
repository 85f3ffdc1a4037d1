"""Available memory: what this process may still take before the kernel kills somebody.

A memfd filled beyond a cgroup's limit ends in SIGKILL, not in an error, so the limit of every ancestor cgroup (v1 and
v2) is read together with ``MemAvailable``. Standard library only.
"""

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_CGROUP_ROOT = Path("/sys/fs/cgroup")


class Available(NamedTuple):
    """Bytes that may still be taken, and the limit that says so."""

    bytes: int
    limit: str


def available(proc: Path = Path("/proc"), cgroup_root: Path = _CGROUP_ROOT) -> Available:
    """The tightest of ``MemAvailable`` and every ancestor cgroup's limit.

    Page cache that the kernel can reclaim counts as available on both sides.
    """
    tightest = Available(_meminfo(proc / "meminfo")["MemAvailable"], "MemAvailable")
    for folder, version in _cgroups(proc / "self/cgroup", cgroup_root):
        room = _room_v2(folder) if version == 2 else _room_v1(folder)
        if room is not None and room < tightest.bytes:
            tightest = Available(room, f"cgroup {folder}")
    return tightest


def resident_bytes(pid: int | str = "self") -> int:
    """What a process has in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def _meminfo(path: Path) -> dict[str, int]:
    pairs = (line.split(":") for line in path.read_text().splitlines() if ":" in line)
    return {key: int(value.split()[0]) * 1024 for key, value in pairs if value.split()[0].isdigit()}


def _cgroups(membership: Path, root: Path) -> Iterator[tuple[Path, int]]:
    """Every ancestor of this process's memory cgroup, innermost first, with the version of its hierarchy."""
    for line in membership.read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            base, version = (root / "unified" if (root / "unified").is_dir() else root), 2
        elif "memory" in controllers.split(","):
            base, version = root / "memory", 1
        else:
            continue
        folder = base / path.lstrip("/")
        while folder != base.parent:
            if folder.is_dir():  # a cgroup namespace can show paths that are not mounted here
                yield folder, version
            folder = folder.parent


def _room_v2(folder: Path) -> int | None:
    limit = _number(folder / "memory.max")
    used = _number(folder / "memory.current")
    if limit is None or used is None:
        return None
    return max(0, limit - used + _stat(folder, "inactive_file"))


def _room_v1(folder: Path) -> int | None:
    limit = _number(folder / "memory.limit_in_bytes")
    used = _number(folder / "memory.usage_in_bytes")
    if limit is None or used is None or limit >= 1 << 60:  # v1 writes "no limit" as a number near 2**63
        return None
    return max(0, limit - used + _stat(folder, "total_inactive_file"))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:  # the root cgroup has no such file
        return None
    return int(text) if text.isdigit() else None


def _stat(folder: Path, name: str) -> int:
    for line in (folder / "memory.stat").read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
