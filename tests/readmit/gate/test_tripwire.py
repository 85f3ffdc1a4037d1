"""A death is known as it begins: here of processes whose main thread has gone, and whose last thread never will."""

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.readmit.gate.dying import EXECUTES, LINGERS, go_on, running
from tests.readmit.gate.harness import until

from readmit.gate.process import Engine
from readmit.gate.tripwire import Tripwire
from weightcache.process import Process, Stat


@contextmanager
def wired(pid: int) -> Iterator[tuple[threading.Event, threading.Thread]]:
    """A wire on a process: whether it tripped, and the thread that waits."""
    engine, tripped = Engine.of(pid), threading.Event()
    assert engine is not None
    wire = Tripwire(engine.pid, engine.start_ticks, tripped.set)
    (thread,) = (it for it in threading.enumerate() if it.name == f"tripwire of {pid}")
    try:
        yield tripped, thread
    finally:
        wire.cut()
        thread.join(60)
        assert not thread.is_alive(), "a wire that was cut leaves its thread behind"


def has_ended(process: Process) -> bool:
    return bool(select.select([process], [], [], 0)[0])


def test_it_tells_of_a_death_long_before_the_pidfd() -> None:
    with running(LINGERS) as dying, wired(dying.pid) as (tripped, _):
        process = Process.open(dying.pid)
        assert process is not None
        assert not tripped.wait(0.2), "it lives"
        go_on(dying)
        assert tripped.wait(60)
        stat = Stat.read(dying.pid)
        assert stat is not None
        assert stat.exiting
        assert Engine.of(dying.pid) is None
        assert not has_ended(process), "its memory, its sockets and its last thread are all there"
        dying.kill()
        assert select.select([process], [], [], 60)[0]
        process.close()


def test_it_tells_of_a_kill() -> None:
    with running(EXECUTES) as killed, wired(killed.pid) as (tripped, _):
        killed.kill()
        assert tripped.wait(60)


def test_a_process_that_executes_another_program_lives_and_is_waited_for() -> None:
    with running(EXECUTES) as shell, wired(shell.pid) as (tripped, thread):
        go_on(shell)
        until(lambda: os.readlink(f"/proc/{shell.pid}/exe").endswith("/cat"), "the other program")
        assert not tripped.wait(1.5), "longer than the thread waits at a time"
        assert thread.is_alive()
        shell.send_signal(signal.SIGTERM)
        assert tripped.wait(60)


def test_a_wire_that_was_cut_never_calls() -> None:
    with running(EXECUTES) as killed:
        with wired(killed.pid) as (tripped, _):
            pass
        killed.kill()
        killed.wait()
        assert not tripped.is_set()


def test_two_wait_for_the_same_process() -> None:
    with running(EXECUTES) as killed, wired(killed.pid) as (ours, thread):
        thread.name = "the other gate's"
        with wired(killed.pid) as (others, _):
            killed.kill()
            assert ours.wait(60)
            assert others.wait(60)


@pytest.mark.parametrize("answer", [1, 11, 22, 38])  # EPERM, EAGAIN, EINVAL, ENOSYS: another kernel, a strict sandbox
def test_where_the_kernel_does_not_do_it_the_pidfd_is_all_there_is(
    answer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("readmit.gate.tripwire._lock", lambda lock, until_s: answer)
    with running(EXECUTES) as living:
        engine = Engine.of(living.pid)
        assert engine is not None
        tripped = threading.Event()
        wire = Tripwire(engine.pid, engine.start_ticks, tripped.set)
        until(lambda: not any(it.name == f"tripwire of {living.pid}" for it in threading.enumerate()), "the thread")
        assert not tripped.is_set()
        wire.cut()
