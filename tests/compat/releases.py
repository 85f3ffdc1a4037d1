"""The release before this one, from the repository's own history, and processes of either."""

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.weightcache.caches import KeptCache, wait_for

ROOT: Final = Path(__file__).parents[2]
ENGINE: Final = Path(__file__).with_name("engine.py")
BEFORE_TAGS: Final = "9fe0d14012b63629dcf1d3fdf2d13ee85055fc3d"
"""What counts as the release before this one as long as there is no tag."""
LABEL: Final = "0.0.0+previous"


def git(*words: str) -> bytes:
    command = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), *words]
    return subprocess.run(command, check=True, capture_output=True).stdout


def has_history() -> bool:
    """Whether this is a clone with more than its last commit."""
    return (ROOT / ".git").exists() and int(git("rev-list", "--count", "HEAD")) > 1


def previous() -> str:
    """The newest tag below HEAD, or `BEFORE_TAGS`.

    Raises:
        LookupError: the history does not go that far back.
    """
    head = git("rev-parse", "HEAD").decode().strip()
    tags = git("tag", "--merged", "HEAD", "--sort=-version:refname", "--list", "v*").decode().split()
    for name in (*tags, BEFORE_TAGS):
        try:
            commit = git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}").decode().strip()
        except subprocess.CalledProcessError:
            raise LookupError(
                f"the release before this one ({name}) is not in this clone: fetch the whole history "
                "(git fetch --unshallow --tags) to test against it"
            ) from None
        if commit != head:
            return name
    raise AssertionError("a commit cannot be older than itself")


def unpack(release: str, folder: Path) -> Path:
    """A release's code, under a version of its own, so that its processes can be told."""
    with tarfile.open(fileobj=io.BytesIO(git("archive", release, "daemon", "service"))) as archive:
        archive.extractall(folder, filter="data")
    (folder / "daemon" / "weightcache" / "version.py").write_text(f'VERSION = "{LABEL}"\n')
    return folder


def path_of(tree: Path) -> str:
    """The PYTHONPATH that runs a tree."""
    return os.pathsep.join([str(tree / "daemon"), str(tree / "service")])


class Installed(KeptCache):
    """A weight cache under a keeper, whose release can be replaced under it, as an installer does."""

    def __init__(self, tree: Path) -> None:
        super().__init__()
        self.install(tree)

    def install(self, tree: Path) -> None:
        """Have whatever starts from now on be of this tree's release."""
        fresh = self.folder / "next"
        fresh.symlink_to(tree)
        fresh.replace(self.folder / "current")

    @property
    def environment(self) -> dict[str, str]:
        return {**super().environment, "PYTHONPATH": path_of(self.folder / "current")}

    def replace_daemon(self) -> str:
        """SIGKILL the daemon; returns the version of the one that comes next."""
        self.kill_daemon()
        return str(self.status()["version"])

    def report(self, tree: Path) -> dict[str, Any]:
        """What ``readmit report`` of a release says of the journal."""
        command = [sys.executable, "-m", "readmit.cli", "report", "--json"]
        environment = {**self.environment, "PYTHONPATH": path_of(tree)}
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        facts: dict[str, Any] = json.loads(done.stdout)
        return facts


class Engine:
    """An engine process of a release, which attaches to caches as it is told."""

    def __init__(self, tree: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(ENGINE)],
            env={**os.environ, "PYTHONPATH": path_of(tree), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, **order: Any) -> dict[str, Any]:
        """One order, and what came of it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order, default=str) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def engine(tree: Path) -> Iterator[Engine]:
    """An engine that ends with the block."""
    running = Engine(tree)
    try:
        yield running
    finally:
        running.close()


__all__ = ["LABEL", "ROOT", "Engine", "Installed", "engine", "has_history", "path_of", "previous", "unpack", "wait_for"]
