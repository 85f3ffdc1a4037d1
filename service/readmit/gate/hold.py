"""Requests that wait for a slot instead of being refused: briefly, and not many."""

import asyncio
from typing import Any

from readmit.gate.problem import Problem
from readmit.gate.slots import Transition
from readmit.gate.upload import Upload


class Hold:
    """The waiting room of one gate.

    Args:
        max_wait_s: how long a request may wait; 0 for not at all.
        max_queue: how many may wait at a time.
    """

    def __init__(self, max_wait_s: float, max_queue: int) -> None:
        self.max_wait_s = max_wait_s
        self._max_queue = max_queue
        self._waiting: set[asyncio.Future[None]] = set()

    def follow(self, step: Transition) -> None:
        """Take in a slot's step: whoever waits may go on when one has become ready."""
        if step.slot.ready:
            self.dismiss()

    def dismiss(self) -> None:
        """Have whoever waits ask again: something has changed."""
        for waiting in self._waiting:
            _wake(waiting)

    def worth_it(self, facts: dict[str, Any]) -> bool:
        """Whether the recovery that a refusal tells of may end in time, as far as its history says."""
        expected, elapsed = facts.get("expected_s"), facts.get("elapsed_s") or 0.0
        return expected is None or expected - elapsed <= self.max_wait_s

    async def wait(self, problem: Problem | None, deadline: float, upload: Upload) -> bool:
        """Wait for a slot to become ready.

        Args:
            problem: what the request would be refused with, None where all slots that are ready have failed it.
            deadline: by the event loop's clock.
            upload: the request's; whose client goes makes room for another one.

        Returns:
            Whether it is worth asking again; False at once where waiting makes no sense or the room is full.
        """
        loop = asyncio.get_running_loop()
        if len(self._waiting) >= self._max_queue or loop.time() >= deadline:
            return False
        if problem is not None and (problem.kind != "not-ready" or not self.worth_it(problem.facts)):
            return False
        waiting: asyncio.Future[None] = loop.create_future()
        leaving = asyncio.create_task(upload.given_up())
        leaving.add_done_callback(lambda _: _wake(waiting))
        self._waiting.add(waiting)
        try:
            async with asyncio.timeout_at(deadline):
                await waiting
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(waiting)
            leaving.cancel()
            await asyncio.wait({leaving})  # two must not read the same body
        return not upload.gone


def _wake(waiting: "asyncio.Future[None]") -> None:
    if not waiting.done():
        waiting.set_result(None)
