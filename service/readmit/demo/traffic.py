"""A steady client: so many requests a second through the gate, whatever happens behind it, every answer checked."""

import asyncio
import threading
import time
from collections import Counter
from typing import Any, Final

import aiohttp

RATE: Final = 20.0
HANG_S: Final = 60.0
"""No answer and no refusal within this is a hang, also on a machine that is busy with ten other things."""
_REFUSALS: Final = {503: "refused", 429: "overload"}


class Traffic:
    """Asks one question over and over, in a thread of its own.

    Args:
        url: the gate's base URL.
        model: the model's name in requests.
        prompt: the question.
        max_tokens: of each answer.

    `right` holds the answers that are right now. What comes back is counted: ``answers`` (right), ``wrong``,
    ``refused`` (503: the gate kept it out), ``overload`` (429: this machine answers fewer a second), ``broken`` (the
    engine died under it, and it was told so), ``hung``, and
    ``unreachable`` (no gate was running: between two parts of the demo).
    """

    def __init__(self, url: str, model: str, prompt: str, max_tokens: int) -> None:
        self.right: frozenset[str] = frozenset()
        self.counts: Counter[str] = Counter()
        self.wrong_answers: list[str] = []
        self._url = f"{url}/v1/completions"
        self._body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="traffic", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> dict[str, Any]:
        """Stop asking, wait for what is under way, and return the counts."""
        self._stop.set()
        self._thread.join(HANG_S + 5)
        names = ("answers", "refused", "wrong", "hung", "overload", "broken", "unreachable")
        return {**{name: self.counts[name] for name in names}, "rate": RATE, "wrong_answers": self.wrong_answers[:5]}

    async def _run(self) -> None:
        limit = aiohttp.ClientTimeout(total=HANG_S)
        async with aiohttp.ClientSession(timeout=limit) as session, asyncio.TaskGroup() as requests:
            due = time.monotonic()
            while not self._stop.is_set():
                requests.create_task(self._ask(session))
                due += 1 / RATE
                await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        right = self.right
        try:
            async with session.post(self._url, json=self._body) as reply:
                if reply.status == 200:
                    text = (await reply.json())["choices"][0]["text"]
                    # The right answer may have changed while the question was under way.
                    if text in right or text in self.right:
                        self.counts["answers"] += 1
                    else:
                        self.counts["wrong"] += 1
                        self.wrong_answers.append(text)
                else:
                    self.counts[_REFUSALS.get(reply.status, "broken")] += 1
        except TimeoutError:
            self.counts["hung"] += 1
        except aiohttp.ClientConnectorError:
            self.counts["unreachable"] += 1
        except aiohttp.ClientError:
            self.counts["broken"] += 1
