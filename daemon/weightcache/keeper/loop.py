"""One thread's event loop: descriptors that become readable, and timers. Standard library only.

asyncio would do, at five times the memory.
"""

import contextlib
import select
import selectors
import signal
import socket
import time
from collections.abc import Callable
from typing import Protocol


class HasFileno(Protocol):
    """Anything `selectors` can watch."""

    def fileno(self) -> int: ...


class Timer:
    """A callback to come; `cancel` may be called at any time, also afterwards."""

    def __init__(self, due: float, callback: Callable[[], None]) -> None:
        self.due = due
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Loop:
    """Calls back what was registered until `stop`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[Timer] = []
        self._running = False

    def watch(self, source: HasFileno, callback: Callable[[], None]) -> None:
        """Call back whenever a descriptor is readable, hang-up included."""
        self._selector.register(source, selectors.EVENT_READ, callback)

    def unwatch(self, source: HasFileno) -> None:
        """Forget a descriptor; it need not be watched."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(source)

    def after(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call back once, after a delay."""
        timer = Timer(time.monotonic() + seconds, callback)
        self._timers.append(timer)
        return timer

    def on_signals(self, numbers: tuple[int, ...], callback: Callable[[int], None]) -> None:
        """Call back from the loop, not from inside other code, when one of these signals arrives."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays in force
                signal.signal(
                    number, lambda _number, _frame: None
                )  # the wake-up descriptor only speaks of handled ones
        self._signal_ends = (ours, theirs)

        def arrived() -> None:
            for number in ours.recv(64):
                if number in numbers:
                    callback(number)

        self.watch(ours, arrived)

    def signalled(self) -> bool:
        """Whether a signal has arrived that was not called back for yet."""
        poller = select.poll()
        poller.register(self._signal_ends[0], select.POLLIN)
        return bool(poller.poll(0))

    def run(self) -> None:
        """Serve until `stop` is called."""
        self._running = True
        while self._running:
            for key, _ in self._selector.select(self._next_delay()):
                # An earlier callback of the same round may have closed this one, and even reused its number.
                if self._selector.get_map().get(key.fd) is key:
                    key.data()
            self._run_timers()

    def stop(self) -> None:
        """Let `run` return after the present round."""
        self._running = False

    def close(self) -> None:
        """Close what the loop itself opened."""
        signal.set_wakeup_fd(-1)
        for end in getattr(self, "_signal_ends", ()):
            end.close()
        self._selector.close()

    def _next_delay(self) -> float | None:
        self._timers = [timer for timer in self._timers if timer.callback is not None]
        return max(0.0, min(timer.due for timer in self._timers) - time.monotonic()) if self._timers else None

    def _run_timers(self) -> None:
        now = time.monotonic()
        for timer in sorted((timer for timer in self._timers if timer.due <= now), key=lambda timer: timer.due):
            # It may have been cancelled by one before it.
            callback, timer.callback = timer.callback, None
            if callback is not None:
                callback()
