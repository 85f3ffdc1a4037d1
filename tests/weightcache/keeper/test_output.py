"""What children print: kept, cut and shown without their noticing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weightcache.keeper import output as output_module
from weightcache.keeper.output import KEPT, Output, prune


def test_a_file_that_outgrows_its_limit_keeps_its_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_module, "OUTPUT_MAX", 10_000)
    output = Output(tmp_path / "log")
    writer = os.dup(output.fileno())
    for number in range(2000):
        os.write(writer, f"line {number}\n".encode())
    output.trim()
    os.write(writer, b"later\n")
    lines = output.path.read_text().splitlines()
    assert lines[0].startswith("[readmit cut this file here")
    assert lines[1:] == [f"line {number}" for number in range(1800, 2000)] + ["later"]
    size = output.path.stat().st_size
    output.trim()
    assert output.path.stat().st_size == size
    os.close(writer)
    output.close()


def test_the_tail_is_the_last_lines_of_whatever_bytes(tmp_path: Path) -> None:
    output = Output(tmp_path / "log")
    os.write(output.fileno(), b"".join(b"%d \xff\n" % number for number in range(300)) + b"no end")
    output.keep_tail()
    tail = (tmp_path / "log.tail").read_bytes().splitlines()
    assert len(tail) == 200
    assert tail[-2:] == [b"299 \xff", b"no end"]
    output.close()


def test_what_is_new_is_shown_once_and_again_from_the_start_after_a_cut(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("of an earlier time\n")
    output = Output(tmp_path / "log")
    reading, writing = os.pipe()
    os.write(output.fileno(), b"one\n")
    output.show(writing)
    output.show(writing)
    assert os.read(reading, 100) == b"one\n"
    os.ftruncate(output.fileno(), 0)
    os.write(output.fileno(), b"two\n")
    output.show(writing)
    assert os.read(reading, 100) == b"two\n"
    for fd in (reading, writing):
        os.close(fd)
    output.close()


def test_a_reader_that_has_gone_or_is_busy_costs_nothing(tmp_path: Path) -> None:
    program = """
import os, sys
from pathlib import Path
from weightcache.keeper.console import say
from weightcache.keeper.output import Output
output = Output(Path(sys.argv[1]))
os.write(output.fileno(), b"x" * 300_000)
output.show(1)
say("y" * 300_000)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "log")]
    busy_reading, busy_writing = os.pipe()
    gone_reading, gone_writing = os.pipe()
    os.close(gone_reading)
    for descriptor in (busy_writing, gone_writing):
        subprocess.run(command, stdout=descriptor, stderr=descriptor, check=True, timeout=60)
        os.close(descriptor)
    os.close(busy_reading)


def test_only_the_newest_attempts_of_the_slot_are_kept(tmp_path: Path) -> None:
    for number in range(KEPT + 5):
        for name in (f"a-0123abcd-{number}.log", f"a-0123abcd-{number}.log.tail", f"a-b-0123abcd-{number}.log"):
            (tmp_path / name).touch()
            os.utime(tmp_path / name, (number, number))
    (tmp_path / "daemon.log").touch()
    prune(tmp_path, "a")
    kept = {path.name for path in tmp_path.iterdir()}
    assert {name for name in kept if name.startswith("a-0") and name.endswith(".log")} == {
        f"a-0123abcd-{number}.log" for number in range(5, KEPT + 5)
    }
    assert "a-0123abcd-0.log.tail" not in kept
    assert "a-b-0123abcd-0.log" in kept
    assert "daemon.log" in kept
