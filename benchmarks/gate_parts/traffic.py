"""A client that asks one question on and on, and keeps what became of each request."""

import asyncio
import json
import re
from typing import NamedTuple

from gate_parts.wire import Wire
from weightcache.journal import boottime_ns

HANG_S = 30.0
"""Neither an answer nor an error within this is a hang."""
_ENGINE = re.compile(rb"\r\nx-engine: (\d+) (\d+) (\d+)", re.IGNORECASE)


class Asked(NamedTuple):
    """One request. ``status`` is 0 where the connection broke, -1 where it hung; times are boottime in nanoseconds.

    ``engine_ns`` is when the engine received the request, and when it began its answer.
    """

    sent_ns: int
    done_ns: int
    status: int
    pid: int
    text: str
    engine_ns: tuple[int, int] = (0, 0)


class Traffic:
    """One request after the other, ``pause_s`` apart.

    Args:
        url: whom to ask.
        question: the request's body.
    """

    def __init__(self, url: str, question: bytes) -> None:
        self.asked: list[Asked] = []
        self.pause_s = 0.0
        self._url = url
        self._question = question
        self._may_ask = asyncio.Event()
        self._may_ask.set()
        self._under_way = False
        self._came = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Traffic":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.result()

    async def pause(self) -> None:
        """Ask nothing more until `resume`; returns when nothing is under way."""
        self._may_ask.clear()
        while self._under_way:
            self._came.clear()
            await self._came.wait()

    def resume(self) -> None:
        """Ask on."""
        self._may_ask.set()

    async def answer_after(self, at_ns: int, not_by: int, right: str) -> Asked:
        """The first right answer that came after a moment and not from a certain process."""
        while True:
            for asked in self.asked:
                if asked.done_ns > at_ns and asked.status == 200 and asked.pid != not_by and asked.text == right:
                    return asked
            self._came.clear()
            await self._came.wait()

    async def _run(self) -> None:
        wire = Wire(self._url)
        try:
            while True:
                await self._may_ask.wait()
                self._under_way = True
                self.asked.append(await self._once(wire))
                self._under_way = False
                self._came.set()
                await asyncio.sleep(self.pause_s)
        finally:
            wire.close()

    async def _once(self, wire: Wire) -> Asked:
        sent = boottime_ns()
        try:
            async with asyncio.timeout(HANG_S):
                reply = await wire.ask("POST", "/v1/completions", self._question)
        except TimeoutError:
            wire.close()
            return Asked(sent, boottime_ns(), -1, 0, "")
        except (OSError, asyncio.IncompleteReadError):
            wire.close()
            return Asked(sent, boottime_ns(), 0, 0, "")
        done = boottime_ns()
        if reply.status != 200:
            return Asked(sent, done, reply.status, 0, "")
        named = _ENGINE.search(reply.head)
        pid, received, answers = map(int, named.groups()) if named else (0, 0, 0)
        return Asked(sent, done, 200, pid, json.loads(reply.body)["choices"][0]["text"], (received, answers))
