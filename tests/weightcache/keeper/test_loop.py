"""The event loop, without a keeper."""

import os
import signal
from collections.abc import Iterator

import pytest

from weightcache.keeper.loop import Loop


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


class Pipe:
    """A pipe whose reading end the loop can watch."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()

    def fileno(self) -> int:
        return self.reading


def test_timers_come_in_the_order_of_their_times_and_not_once_cancelled(loop: Loop) -> None:
    came: list[str] = []
    last = loop.after(0.03, lambda: came.append("cancelled by the one before"))
    loop.after(0.02, lambda: (came.append("second"), last.cancel()))
    loop.after(0.01, lambda: came.append("first"))
    loop.after(0.04, loop.stop)
    loop.after(0.005, lambda: came.append("never")).cancel()
    loop.run()
    assert came == ["first", "second"]


def test_a_timer_set_by_a_timer_comes_too(loop: Loop) -> None:
    came: list[int] = []

    def again() -> None:
        came.append(len(came))
        loop.after(0, again if len(came) < 3 else loop.stop)

    loop.after(0, again)
    loop.run()
    assert came == [0, 1, 2]


def test_a_descriptor_closed_by_an_earlier_callback_of_the_round_is_not_called(loop: Loop) -> None:
    pipes = [Pipe(), Pipe()]
    called: list[int] = []

    def close_the_other(place: int) -> None:
        called.append(place)
        for pipe in pipes:
            loop.unwatch(pipe)
        loop.stop()

    for place, pipe in enumerate(pipes):
        os.write(pipe.writing, b"x")
        loop.watch(pipe, lambda place=place: close_the_other(place))  # type: ignore[misc]
    loop.run()
    assert len(called) == 1
    for pipe in pipes:
        os.close(pipe.reading)
        os.close(pipe.writing)


def test_signals_are_heard_from_the_loop_and_ignored_ones_stay_ignored(loop: Loop) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    heard: list[int] = []
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        loop.on_signals((signal.SIGUSR1, signal.SIGUSR2), lambda number: (heard.append(number), loop.stop()))
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == []
        loop.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert heard == [signal.SIGUSR1]
