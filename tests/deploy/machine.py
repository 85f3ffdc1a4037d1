"""systemd as process 1 of namespaces of its own, over this machine's files, which it cannot change."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

T = TypeVar("T")
PATIENCE_S: Final = 240.0
SYSTEMD: Final = Path("/lib/systemd/systemd")
TARGETS: Final = ("basic", "multi-user", "network", "shutdown", "sysinit")
"""Empty ones take the place of everything that boots a whole machine."""

# A cgroup of its own, so that what systemd makes of it can be removed again.
_OUTSIDE: Final = """
set -e
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/cgroup
mount -t cgroup2 cgroup2 /run/cgroup
mkdir /run/cgroup/{name}
echo $$ > /run/cgroup/{name}/cgroup.procs
umount /run/cgroup
exec unshare --pid --fork --kill-child --cgroup --ipc --uts --mount-proc sh -c '{inside}'
"""
_INSIDE: Final = """
set -e
mkdir -p /run/upper /run/work
mount -t overlay overlay -o lowerdir=/etc,upperdir=/run/upper,workdir=/run/work /etc
mount -t tmpfs -o mode=755 tmpfs /opt
mount --bind {folder}/state /var/lib
mkdir -p /opt/readmit/bin /etc/readmit
ln -s {readmit} /opt/readmit/bin/readmit
cp {folder}/etc/* /etc/readmit
echo readmit:x:0:0::/:/bin/sh >> /etc/passwd
mount --bind {folder}/systemd.log /dev/console || true
umount -R /sys/fs/cgroup || true
mount -t cgroup2 cgroup2 /sys/fs/cgroup
exec env -i container=readmit PATH={path} SYSTEMD_UNIT_PATH={folder}/units {systemd} --system \\
  --unit=multi-user.target --log-target=console --show-status=0
"""
_CLEAR: Final = (
    "mount -t tmpfs tmpfs /run && mkdir /run/cgroup && mount -t cgroup2 cgroup2 /run/cgroup && "
    "find /run/cgroup/{name} -depth -type d -exec rmdir {{}} +"
)


def wait_for(condition: Callable[[], T], what: str) -> T:
    """Poll until a condition is true; fails after a generous while."""
    deadline = time.monotonic() + PATIENCE_S
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {PATIENCE_S:g} s until {what}")
        time.sleep(0.05)
    return result


def why_no_namespaces() -> str | None:
    """Why processes cannot be given a process namespace here; None if they can."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "true"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if result.returncode == 0 else result.stderr.strip()


def inner(outside: int) -> int | None:
    """The process that `unshare --fork` has started, by its number here."""
    children = Path(f"/proc/{outside}/task/{outside}/children").read_text().split()
    return int(children[0]) if children else None


def why_not() -> str | None:
    """Why systemd cannot run as process 1 of namespaces here; None if it can."""
    if not SYSTEMD.exists():
        return f"there is no {SYSTEMD}"
    namespaces = ("--mount", "--pid", "--fork", "--cgroup", "--ipc", "--uts", "--mount-proc")
    group = f"/run/c/readmit-tried-{os.getpid()}"  # cgroups are no namespace's own: others may be trying too
    steps = (
        "mount -t tmpfs t /run",
        "mkdir /run/c",
        "mount -t cgroup2 c /run/c",
        f"mkdir {group}",
        f"rmdir {group}",
        "mkdir /run/u /run/w",
        "mount -t overlay o -o lowerdir=/etc,upperdir=/run/u,workdir=/run/w /etc",
    )
    command = ["unshare", *namespaces, "sh", "-c", " && ".join(steps)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if result.returncode == 0 else result.stderr.strip()


class Machine:
    """A machine that runs some units.

    Args:
        folder: has ``units``, what goes into ``/etc/readmit`` in ``etc``, and ``/var/lib`` in ``state``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for target in TARGETS:
            (folder / "units" / f"{target}.target").write_text(f"[Unit]\nDescription={target}\n")
        self._name = f"readmit-{folder.name}"
        self._log = (folder / "systemd.log").open("w")
        readmit = Path(sys.executable).with_name("readmit")
        inside = _INSIDE.format(folder=folder, readmit=readmit, path=os.environ["PATH"], systemd=SYSTEMD)
        assert "'" not in inside
        script = _OUTSIDE.format(name=self._name, inside=inside)
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
        self._outside = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        self.pid = wait_for(self._first, "systemd runs")
        started = ("running", "degraded")
        wait_for(lambda: self.run("systemctl", "is-system-running").stdout.strip() in started, "it has started")

    def _first(self) -> int | None:
        if self._outside.poll() is not None:
            raise RuntimeError((self.folder / "systemd.log").read_text())
        pid = inner(self._outside.pid)
        return pid if pid and Path(f"/proc/{pid}/comm").read_text() == "systemd\n" else None

    @property
    def root(self) -> Path:
        """Its files, from here."""
        return Path(f"/proc/{self.pid}/root")

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run a command in it."""
        command = ["nsenter", "--target", str(self.pid), "--all", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    def systemctl(self, *words: str) -> str:
        """Run systemctl, which must succeed."""
        result = self.run("systemctl", *words)
        assert result.returncode == 0, f"{words}: {result.stderr}\n{self.log()}"
        return result.stdout

    def unit(self, name: str) -> dict[str, Any]:
        """What systemd says of a unit; pids are those of the machine."""
        shown = self.systemctl("show", name, "--property=ActiveState,MainPID,NFileDescriptorStore")
        return dict(line.split("=", 1) for line in shown.splitlines())

    def log(self) -> str:
        """What it and its services have said."""
        return (self.folder / "systemd.log").read_text()

    def close(self) -> None:
        """End it, and everything in it."""
        self._outside.kill()
        self._outside.wait()
        wait_for(lambda: not Path(f"/proc/{self.pid}").exists(), "all has ended")
        self._log.close()
        subprocess.run(["unshare", "--mount", "sh", "-c", _CLEAR.format(name=self._name)], check=True)


@contextmanager
def machine(folder: Path) -> Iterator[Machine]:
    """A machine that ends with the block, and its folder."""
    running = Machine(folder)
    try:
        yield running
    finally:
        running.close()
        shutil.rmtree(folder)
