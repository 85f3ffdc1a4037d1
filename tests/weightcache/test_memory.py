"""What memory is left: the tightest limit of the machine and of every cgroup above a process, in both versions."""

from pathlib import Path

import pytest

from weightcache.memory import Available, available


def proc(tmp_path: Path, membership: str, available_kib: int = 8192) -> Path:
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(f"MemTotal: 9000 kB\nMemAvailable: {available_kib} kB\nHugePages_Total: 0\n")
    (folder / "self/cgroup").write_text(membership)
    return folder


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)


def test_without_limits_the_machine_decides(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    group(root)
    assert available(proc(tmp_path, "0::/\n"), root) == Available(8192 * 1024, "MemAvailable")


def test_the_tightest_ancestor_of_version_2_decides(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    group(root / "pod", memory__max="5000000", memory__current="4000000", memory__stat="anon 1\ninactive_file 300000\n")
    group(root / "pod/engine", memory__max="max", memory__current="1000", memory__stat="inactive_file 0\n")
    found = available(proc(tmp_path, "0::/pod/engine\n"), root)
    assert found == Available(1_300_000, f"cgroup {root / 'pod'}")


def test_the_tightest_ancestor_of_version_1_decides(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    stat = "inactive_file 7\ntotal_inactive_file 500\n"
    group(root / "memory/a", memory__limit_in_bytes="9000", memory__usage_in_bytes="4000", memory__stat=stat)
    unlimited = str(0x7FFFFFFFFFFFF000)
    group(root / "memory/a/b", memory__limit_in_bytes=unlimited, memory__usage_in_bytes="1", memory__stat=stat)
    found = available(proc(tmp_path, "5:cpu:/x\n4:memory:/a/b\n0::/z\n"), root)
    assert found == Available(5500, f"cgroup {root / 'memory/a'}")


def test_a_limit_that_is_passed_leaves_nothing(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    group(root / "a", memory__max="1000", memory__current="5000", memory__stat="inactive_file 10\n")
    assert available(proc(tmp_path, "0::/a\n"), root).bytes == 0


@pytest.mark.parametrize("membership", ["0::/../../elsewhere\n", "0::/not/mounted/here\n"])
def test_a_group_that_is_not_mounted_here_limits_nothing(tmp_path: Path, membership: str) -> None:
    root = tmp_path / "cgroup"
    group(root)
    assert available(proc(tmp_path, membership), root).limit == "MemAvailable"


def test_this_machine_has_some() -> None:
    assert available().bytes > 0
