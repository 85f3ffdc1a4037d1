"""Pruning: which events of the past may go once a snapshot tells what they came to.

Whole episodes go, or nothing of them: a reader of what is left finds no end without a beginning. What a keeper, a gate
or an engine looks up when it starts stays, however old it is: of each slot the latest recovery, what is open, and the
latest event of some kinds; of the node what was published, released and put into quarantine.
"""

import sqlite3
from collections.abc import Collection
from typing import Final

from weightcache.journal.database import transaction

PROBES_KEPT_S: Final = 7 * 86_400
"""Probes are nearly all of a journal (one every ten seconds and slot) and only ever counted: they go after a week."""

_SHORT_LIVED: Final = ("probe", "clock")

_ALWAYS_KEPT: Final = ("publish", "release", "quarantine", "override")
_LATEST_KEPT: Final = ("slot_state", "process", "lookup", "episode_open", "attempt_start")
_AT_ONCE: Final = 500
"""Events deleted in one transaction: a writer that waits for it waits for a few milliseconds."""


def prune(
    connection: sqlite3.Connection,
    until: int,
    before_wall_ns: int,
    *,
    open_episodes: Collection[str],
    last_episodes: Collection[str],
    slots: Collection[str],
) -> int:
    """Delete events that are not needed any more; returns how many went.

    Args:
        connection: to the journal.
        until: the id up to which a snapshot tells what the events came to.
        before_wall_ns: what is older than that goes; of probes everything up to ``until``.
        open_episodes: these stay.
        last_episodes: these stay as well, but for probes.
        slots: the names of all slots.

    Raises:
        sqlite3.Error: the database takes nothing now. What went is gone for good, the rest goes another time.
    """
    latest = {
        id_
        for slot in slots
        for kind in _LATEST_KEPT
        for (id_,) in connection.execute("SELECT max(id) FROM events WHERE slot = ? AND kind = ?", (slot, kind))
    }
    short = ", ".join("?" * len(_SHORT_LIVED))
    clause = f"SELECT DISTINCT episode FROM events WHERE id <= ? AND wall_ns >= ? AND kind NOT IN ({short})"
    young = {episode for (episode,) in connection.execute(clause, (until, before_wall_ns, *_SHORT_LIVED))}
    stays = (young | {*last_episodes}) - {None}  # what belongs to no episode goes by its own age
    # Read row by row: a journal of years is larger than a daemon should ever be.
    rows = connection.execute("SELECT id, kind, wall_ns, episode FROM events WHERE id <= ? ORDER BY id", (until,))
    gone = [
        id_
        for id_, kind, wall_ns, episode in rows
        if episode not in open_episodes
        and id_ not in latest
        and (kind in _SHORT_LIVED or (kind not in _ALWAYS_KEPT and wall_ns < before_wall_ns and episode not in stays))
    ]
    for first in range(0, len(gone), _AT_ONCE):
        batch = [(id_,) for id_ in gone[first : first + _AT_ONCE]]
        with transaction(connection):
            connection.executemany("DELETE FROM events WHERE id = ?", batch)
    return len(gone)
