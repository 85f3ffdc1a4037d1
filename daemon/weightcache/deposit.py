"""Descriptors left with the keeper (or systemd), without ever making the event loop wait for it.

A keeper that is stopped takes nothing from its queue, and a send then takes seconds. So everything for it goes, in
order, through one thread. It works on duplicates: what the loop closes meanwhile is not stored under another's name.
"""

import logging
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from weightcache.frames import close_all
from weightcache.sdnotify import Notifier

_log: Final = logging.getLogger("weightcache.deposit")


class Deposit:
    """What the daemon leaves with its keeper.

    Args:
        notifier: speaks to the keeper; without one nothing is stored, and every answer is False.
    """

    def __init__(self, notifier: Notifier) -> None:
        self.notifier = notifier
        self._thread = ThreadPoolExecutor(1, "deposit")

    @property
    def active(self) -> bool:
        return self.notifier.active

    def store(self, named: Iterable[tuple[str, int]], *, poll: bool = False) -> "Future[bool]":
        """Leave duplicates of descriptors; the result says whether the keeper holds them all by now.

        Args:
            named: names and descriptors.
            poll: let the keeper drop a connection by itself once its peer is gone.
        """
        if not self.active:
            return _answer(False)
        copies: list[tuple[str, int]] = []
        try:
            for name, descriptor in named:
                copies.append((name, os.dup(descriptor)))
        except OSError as error:
            _log.error("nothing can be stored with the keeper: %s", error)
            close_all([descriptor for _, descriptor in copies])
            return _answer(False)
        return self._thread.submit(self._store, copies, poll)

    def remove(self, names: Iterable[str]) -> "Future[bool]":
        """Have the keeper close what has these names; the result says whether it has by now."""
        return self._thread.submit(self._remove, list(names)) if self.active else _answer(False)

    def close(self) -> None:
        """Take no more. What is not sent yet is dropped: a keeper that has not taken it by now may never."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _store(self, copies: list[tuple[str, int]], poll: bool) -> bool:
        try:
            sent = all(self.notifier.store(name, descriptor, poll=poll) for name, descriptor in copies)
            return sent and self.notifier.barrier()
        except OSError as error:
            _log.error("the keeper cannot be reached: %s", error)
            return False
        finally:
            close_all([descriptor for _, descriptor in copies])

    def _remove(self, names: list[str]) -> bool:
        try:
            return all(self.notifier.remove(name) for name in names) and self.notifier.barrier()
        except OSError as error:
            _log.error("the keeper cannot be reached: %s", error)
            return False


def _answer(stored: bool) -> "Future[bool]":
    future: Future[bool] = Future()
    future.set_result(stored)
    return future
