"""Golden questions that an engine leaves unanswered: late, until that has lasted too long."""

from readmit.gate.settings import GateSettings
from readmit.gate.slots import Slot
from weightcache.journal import boottime_ns


class Silence:
    """The silence of one engine, which has answered before.

    Nothing but its own answer to such a question ends it. Users only count as what the question may be waiting for.

    Args:
        slot: where the engine runs.
        settings: how long an idle and a busy engine may be silent.
    """

    def __init__(self, slot: Slot, settings: GateSettings) -> None:
        self._slot = slot
        self._settings = settings
        self.since_ns: int | None = None
        """Since when, None where it does not last."""
        self._idle_since_ns: int | None = None

    @property
    def lasts(self) -> bool:
        """Whether a question has gone unanswered since the last answer."""
        return self.since_ns is not None

    def end(self) -> None:
        """It has answered."""
        self.since_ns = self._idle_since_ns = None

    def hangs(self, put_ns: int, *, stopped: bool) -> bool:
        """No answer came in time; returns whether that is a hang by now.

        Args:
            put_ns: boottime at which the question was put.
            stopped: whether a signal holds the engine still, which is then busy with nothing.
        """
        slot, now_ns = self._slot, boottime_ns()
        if self.since_ns is None:
            self.since_ns = put_ns
        users = slot.in_flight > 0 or slot.idle_ns > put_ns
        # Who asked after it and was answered before it shows that others are not what keeps it waiting.
        if users and not stopped and slot.answered_ns <= put_ns:
            self._idle_since_ns = None
            return now_ns - self.since_ns >= self._settings.busy_hang_limit_s * 1e9
        if self._idle_since_ns is None:
            self._idle_since_ns = put_ns
        return now_ns - self._idle_since_ns >= self._settings.hang_limit_s * 1e9
