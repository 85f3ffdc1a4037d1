"""Asks one engine the golden questions, and makes sure that it was that engine that answered."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple

import aiohttp
from yarl import URL

from readmit.gate.probe_files import ProbeFiles, staleness
from readmit.gate.process import Engine
from readmit.probes import Expectation, Interrogation, Probe, ProbeSet, Verdict, served_model
from weightcache.journal import boottime_ns

Result = Literal["correct", "wrong", "late", "error", "engine_exited", "foreign_listener", "no_probes", "stale_probes"]

SIGN_OF_LIFE = Probe("sign-of-life", "Hello", 1, Expectation(regex=""))
"""Asked where nobody recorded golden answers: any completion will do, which proves little and is said to."""
BUSY_STATUSES = (429, 503)
"""What a server answers that could and will not now: it is late, not broken."""


class Finding(NamedTuple):
    """What one verification found.

    Attributes:
        result: the worst of the verdicts, or why the engine could not be asked.
        asked_ns: boottime at which the first question was put.
        verdicts: one for each question that was put.
        probe_set: the digest of the set that this slot is to be asked, None where there is none.
        message: for people; empty when all is well.
        overridden: an override let pass what would not have been asked, or not been enough.
    """

    result: Result
    asked_ns: int
    verdicts: tuple[Verdict, ...] = ()
    probe_set: str | None = None
    message: str = ""
    overridden: bool = False

    @property
    def put_ns(self) -> int:
        """Boottime at which the last question was put."""
        return self.asked_ns + round(sum(verdict.seconds for verdict in self.verdicts[:-1]) * 1e9)

    @property
    def refused(self) -> bool:
        """Whether nobody listened."""
        return self.result == "error" and self.verdicts[-1].refused

    @property
    def busy(self) -> bool:
        """Whether the engine said that it has no time."""
        return self.result == "error" and self.verdicts[-1].status in BUSY_STATUSES


class Verifier:
    """Puts the questions that belong to an engine's weights.

    Args:
        probes: where the questions are.
        unverified_ok: whether a `SIGN_OF_LIFE` will do where there are no questions.
        headers: sent with every question.
    """

    def __init__(self, probes: ProbeFiles, unverified_ok: bool, headers: Mapping[str, str]) -> None:
        self.probes = probes
        self._unverified_ok = unverified_ok
        self._headers = headers

    async def examine(
        self,
        url: str,
        engine: Engine | None,
        limit_s: float,
        weights: Mapping[str, Any],
        *,
        turn: int | None = None,
        overridden: bool = False,
        asking: Callable[[], None] = lambda: None,
    ) -> Finding:
        """Ask the engine that should be behind a URL. Only answers during which it lived and listened count.

        Args:
            url: the engine's base URL.
            engine: the process that must be the one that answers.
            limit_s: when an answer is late.
            weights: what is known of the weights it runs on, as fields of a `CacheConfig`.
            turn: put one question only, the next with every turn; all of them if None.
            overridden: ask also without golden answers, or with stale ones.
            asking: called when the first question is about to be put.
        """
        asked_ns = boottime_ns()
        probe_set = self.probes.of(weights)
        digest = probe_set.digest if probe_set is not None else None
        stale = staleness(probe_set, weights) if probe_set is not None else None
        if stale is not None and not overridden:
            return Finding("stale_probes", asked_ns, probe_set=digest, message=stale)
        if probe_set is None and not (self._unverified_ok or overridden):
            return Finding("no_probes", asked_ns, message=self.probes.why_none())
        if (problem := await _stranger(url, engine)) is not None:
            return Finding(problem, asked_ns, probe_set=digest, message=_EXPLAINED[problem])
        asking()
        asked_ns = boottime_ns()
        verdicts = tuple(await self._ask(url, probe_set, limit_s, turn))
        if (problem := await _stranger(url, engine)) is not None:
            return Finding(problem, asked_ns, verdicts, digest, _EXPLAINED[problem])
        doubtful = stale is not None or (probe_set is None and not self._unverified_ok)
        for result in ("error", "late", "wrong"):
            for verdict in verdicts:
                if verdict.result == result:
                    return Finding(verdict.result, asked_ns, verdicts, digest, str(verdict), doubtful)
        return Finding("correct", asked_ns, verdicts, digest, overridden=doubtful)

    async def _ask(self, url: str, probe_set: ProbeSet | None, limit_s: float, turn: int | None) -> list[Verdict]:
        if probe_set is not None:
            probes = probe_set.probes if turn is None else (probe_set.probes[turn % len(probe_set.probes)],)
            return await Interrogation(url, probe_set.model, self._headers).put_all(probes, limit_s)
        try:
            async with asyncio.timeout(limit_s):
                model = await served_model(url, self._headers)
        except TimeoutError:
            return [Verdict(SIGN_OF_LIFE.name, "late", limit_s, message="no list of models in time")]
        except (aiohttp.ClientError, OSError) as error:
            return [Verdict.without_answer(SIGN_OF_LIFE, error, 0.0)]
        return [await Interrogation(url, model, self._headers).put(SIGN_OF_LIFE, limit_s)]


_DYING_S: Final = 0.1
"""A process that dies has no descriptors a moment before it is known to be dead; its socket then seems another's."""
_EXPLAINED: Mapping[Literal["engine_exited", "foreign_listener"], str] = {
    "engine_exited": "the engine's process is gone",
    "foreign_listener": "another process than the slot's engine listens on its port",
}


async def _stranger(url: str, engine: Engine | None) -> Literal["engine_exited", "foreign_listener"] | None:
    if engine is None:
        return None
    where = URL(url)
    for pause in (_DYING_S, 0.0):
        if not engine.alive:
            return "engine_exited"
        # In a thread: the engine's descriptors can be thousands.
        listens = await asyncio.to_thread(engine.listens, where.host or "", where.port or 80)
        if listens is not False:
            return None
        await asyncio.sleep(pause)
    return "foreign_listener"
