"""Lines for whoever watches the keeper, never at the price of waiting for them. Standard library only."""

import os
import select
from typing import Final

from weightcache.journal import Context
from weightcache.log_line import chosen, log_line

_ATOMIC: Final = select.PIPE_BUF


def say(text: str, where: Context | None = None) -> None:
    """Print a line on standard error, or drop what nobody takes at once.

    A terminal stopped with Ctrl-S, or a pipe whose reader is busy, would hold up every recovery.

    Args:
        text: for people.
        where: the recovery that it belongs to, for logs in JSON.
    """
    if chosen() == "json":
        place = (where or Context.from_environment())._asdict()
        offer(2, f"{log_line('info', 'weightcache.keeper', text, place)}\n".encode())
    else:
        offer(2, f"readmit: {text}\n".encode())


def offer(fd: int, data: bytes) -> int:
    """Write as much as can be written at once; returns the number of bytes taken."""
    poller = select.poll()
    try:
        poller.register(fd, select.POLLOUT)
        taken = 0
        while taken < len(data):
            ready = poller.poll(0)
            if not ready or not ready[0][1] & select.POLLOUT:
                break
            taken += os.write(fd, data[taken : taken + _ATOMIC])
    except OSError:  # the reader has gone
        return len(data)
    return taken
