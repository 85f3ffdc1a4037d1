"""Users' requests that an engine leaves without a first byte, though it answers golden questions."""

import time
from collections.abc import Iterable
from typing import Final

from readmit.gate.upload import Upload

_MOST: Final = 0.9
"""Of the limit. The rest may have gone by while the request came in."""
_KEPT: Final = 100
"""More are not told apart; nobody needs as many to be sure."""


class _Record:
    """What one slot's engine has left unanswered since it answered last, and since when (monotonic seconds)."""

    def __init__(self) -> None:
        self.answered_s = 0.0
        self.requests: dict[bytes, float] = {}


class Neglect:
    """The account of one gate.

    A request counts once, however often it is sent, and only when it had come in whole, was asked of an engine that
    must generate something (``POST``), and nobody else was answered by that engine meanwhile. So neither one client's
    odd request nor a slow upload nor a busy engine adds up to anything.

    Where a second slot does the same before anybody was answered, it is the requests that are suspect.

    Args:
        slots: the slots' names.
        limit_s: how long a request must have waited.
        enough: how many different requests are an engine's fault.
    """

    def __init__(self, slots: Iterable[str], limit_s: float, enough: int) -> None:
        self._records = {name: _Record() for name in slots}
        self._limit_s = limit_s
        self._enough = enough
        self._blamed = False
        """Some slot was taken out of service for this, and nobody has been answered since."""

    def answered(self, slot: str) -> None:
        """An engine has begun to answer a user."""
        record = self._records[slot]
        record.answered_s = time.monotonic()
        if record.requests:
            record.requests.clear()
        self._blamed = False

    def left(self, slot: str, upload: Upload) -> None:
        """A request was given up, by its client or by the gate, without a first byte."""
        record = self._records[slot]
        came_s = upload.whole_s
        if not upload.generates or came_s is None or came_s < record.answered_s or len(record.requests) >= _KEPT:
            return
        if time.monotonic() - came_s >= _MOST * self._limit_s:
            record.requests.setdefault(upload.digest(), came_s)

    def requests(self, slot: str) -> int:
        """How many different ones in a row were left."""
        return len(self._records[slot].requests)

    def faults(self, slot: str) -> bool:
        """Whether that is too many, and the engine's doing as far as anybody can know."""
        return self.requests(slot) >= self._enough and not self._blamed

    def blame(self, slot: str) -> float:
        """A slot is taken out of service for it; returns how long ago the first of the requests was put, in seconds."""
        record = self._records[slot]
        now_s = time.monotonic()
        since_s = now_s - min(record.requests.values(), default=now_s)
        record.requests.clear()
        self._blamed = True
        return since_s

    @property
    def suspect(self) -> bool:
        """Whether the requests are suspect, not the engines."""
        return self._blamed and any(len(record.requests) >= self._enough for record in self._records.values())
