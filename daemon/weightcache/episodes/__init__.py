"""Replay of the journal into slots, episodes, attempts and phases.

::

    replay = Replay()
    replay.catch_up(journal)                # again whenever journal.last_id() moved
    replay.slots["a"].episode               # the open episode, or None
    replay.slots["a"].attempt.phase         # what its engine is doing now

Every time here is a nanosecond count of `weightcache.clock.Clock` (`Replay.clock.now` is the present). Events may come
late and out of order, because a spool is merged after the fact: each is placed by its own time, and what is derived is
derived from all that is known when asked.

Standard library only: the keeper imports this package.
"""

from weightcache.episodes.episode import Attempt, Episode, Lookup
from weightcache.episodes.replay import Change, Replay, Slot

__all__ = ["Attempt", "Change", "Episode", "Lookup", "Replay", "Slot"]
