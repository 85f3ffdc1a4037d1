"""Would the next start of a slot find its weights resident? The weight cache is asked before anybody needs to know.

The question is what the slot's engine asked last. Whether the files of its checkpoint have changed since is for the
daemon's own forecast to find (``weightcache_next_start_would_hit``); this one knows what is resident.
"""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from weightcache.asked import Fields, question
from weightcache.errors import CacheMiss, ConfigError
from weightcache.messages import Done, Explain, Hello
from weightcache.protocol import Connection
from weightcache.version import VERSION

EVERY_S: Final = 5.0
AWAY: Final = frozenset(("no_daemon", "refused", "timeout", "daemon_died"))
"""Why nobody answered. A daemon that is restarted holds in a moment what it held before."""

log = logging.getLogger("readmit.gate")


class NextStart(NamedTuple):
    """About one slot. Of ranks that would miss, the lowest one's reason."""

    would_hit: bool
    reason: str | None = None
    detail: str | None = None
    message: str = ""

    @property
    def path(self) -> str | None:
        """The path of a recovery that begins now, None where that is not known."""
        return "hit" if self.would_hit else None if self.reason in AWAY else "miss"


def foresee(socket: Path, asked: Mapping[int, Fields]) -> NextStart | None:
    """Ask the daemon about every rank of a slot; None where nothing was ever asked, or nobody answers.

    Args:
        socket: the weight cache's.
        asked: what each rank asked for last.
    """
    if not asked:
        return None
    try:
        connection = Connection(socket, Hello(version=VERSION))
        try:
            for rank in sorted(asked):
                config, device = question(asked[rank])
                verdict = connection.ask(Explain(config=config, device=device), Done)[0].data
                if not verdict["would_hit"]:
                    return NextStart(False, verdict["reason"], verdict.get("detail"), verdict.get("message", ""))
        finally:
            connection.close()
    except CacheMiss as miss:  # no daemon, or none that answers: the next start would fare alike
        return NextStart(False, miss.reason, miss.detail, str(miss))
    except ConfigError as error:
        log.debug("the next start is not foreseen: %s", error)
        return None
    return NextStart(True)


async def foresee_all(socket: Path, asked: Mapping[str, Mapping[int, Fields]]) -> dict[str, NextStart | None]:
    """`foresee` for every slot."""
    return {slot: await asyncio.to_thread(foresee, socket, ranks) for slot, ranks in asked.items()}
