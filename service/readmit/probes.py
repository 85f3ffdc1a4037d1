"""Golden answers: questions whose correct answers were recorded from a good load, and what an engine makes of them.

A probe set belongs to a model revision and its quantisation, not to an engine's version. Every question goes to
``/v1/completions`` with temperature 0 over a connection of its own, so that an answer is the answer to that question
from whoever listens at that moment.

An answer is `correct`, `wrong` (it differs), `late` (none within the limit) or an `error` (no answer at all: refused,
cut off, an HTTP error). Late is not wrong: a busy engine is late.
"""

import asyncio
import errno
import hashlib
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

import aiohttp
import msgspec
from yarl import URL

from readmit.exchange import Answer, NoCompletion, answer_of, exchange, short
from weightcache.errors import ConfigError

Result = Literal["correct", "wrong", "late", "error"]
By = Literal["text", "tokens", "token-ids", "logprobs"]
"""What of a golden answer is compared."""
RESULTS: Final[tuple[Result, ...]] = ("correct", "wrong", "late", "error")

DEFAULT_PROMPTS: Final = (
    "The capital of France is",
    "Water freezes at a temperature of zero degrees Celsius and boils at a temperature of",
    # Long enough for several pages of KV cache.
    "Once upon a time there was a baker who counted his loaves. " * 12 + "On the next morning the baker counted his",
)
"""Asked when nobody names better ones."""


class Expectation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a correct answer looks like: exactly one of ``text``, ``regex``, ``tokens`` and ``token_ids``.

    Attributes:
        text: the whole answer.
        regex: a regular expression found somewhere in it (`re.search`).
        tokens: the answer's tokens as text, as ``logprobs`` gives them.
        token_ids: their ids, which also tell apart tokens that are written alike, such as parts of one character.
        logprobs: their log-probabilities, one for each token; only together with ``tokens`` or ``token_ids``.
        tolerance: how far each log-probability may be away, in nats.
    """

    text: str | None = None
    regex: str | None = None
    tokens: tuple[str, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    tolerance: float = 0.5

    def __post_init__(self) -> None:
        if sum(kind is not None for kind in (self.text, self.regex, self.tokens, self.token_ids)) != 1:
            raise ValueError("an expectation has exactly one of text, regex and tokens or token_ids")
        if self.logprobs is not None and len(self.logprobs) != len(self.tokens or self.token_ids or ()):
            raise ValueError("logprobs has one number for each of the tokens")
        if self.regex is not None:
            try:
                re.compile(self.regex)
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(f"{self.regex!r} is not a regular expression: {error}") from error

    def __str__(self) -> str:
        if self.text is not None:
            return repr(self.text)
        if self.regex is not None:
            return f"/{self.regex}/"
        return f"the tokens {list(self.tokens or self.token_ids or ())}"


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One question. ``max_tokens`` bounds its answer."""

    name: str
    prompt: str
    max_tokens: int
    expect: Expectation


class ProbeSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The questions of one model revision.

    Attributes:
        model: the name under which engines serve it.
        probes: at least one.
        checkpoint_digest: content identity of the checkpoint they were recorded from, if known.
        quant_method: its quantisation, None for none.
        recorded_at: when, ISO 8601.
        engine: what answered, for people.
    """

    model: str
    probes: tuple[Probe, ...]
    checkpoint_digest: str | None = None
    quant_method: str | None = None
    recorded_at: str | None = None
    engine: str | None = None

    def __post_init__(self) -> None:
        names = [probe.name for probe in self.probes]
        if not names or len(set(names)) != len(names):
            raise ValueError("probes is a list of one or more probes with different names")

    @property
    def digest(self) -> str:
        """What tells this set from another: 16 hexadecimal digits over the model's name and the probes."""
        return hashlib.sha256(msgspec.json.encode((self.model, self.probes))).hexdigest()[:16]

    @classmethod
    def load(cls, path: Path) -> "ProbeSet":
        """Read a probe file.

        Raises:
            ConfigError: ``probes_absent`` when there is none, ``probes`` when it is not one.
        """
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError as error:
            raise ConfigError(
                "probes_absent",
                f"there is no probe file {path}",
                remedy=f"Record one from a good load: readmit probe record URL --out {path}",
                path=str(path),
            ) from error
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(
                "probes",
                f"{path} is not a probe file: {error}",
                remedy=f"Record it anew: readmit probe record URL --out {path}",
                path=str(path),
            ) from error

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")
        partial.rename(path)


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """What came of one question.

    Attributes:
        probe: its name.
        result: `correct`, `wrong`, `late` or `error`.
        seconds: from the question to the answer, or to giving up.
        expected: what was expected, unless it came.
        found: what came instead.
        message: why there is no answer.
        status: the HTTP status of an error, None where there was none.
        refused: whether nobody listened.
    """

    probe: str
    result: Result
    seconds: float
    expected: str | None = None
    found: str | None = None
    message: str | None = None
    status: int | None = None
    refused: bool = False

    def facts(self) -> dict[str, Any]:
        """What the journal keeps of it."""
        facts = {"probe": self.probe, "seconds": self.seconds, "expected": self.expected, "found": self.found}
        return {key: value for key, value in {**facts, "message": self.message}.items() if value is not None}

    @classmethod
    def without_answer(cls, probe: Probe, error: Exception, seconds: float) -> "Verdict":
        """The verdict on an engine that gave none: an error, or late when it is we who had no room to ask."""
        number = error.errno if isinstance(error, OSError) else None
        return cls(
            probe.name,
            "late" if number in (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL) else "error",
            seconds,
            message=told(error),
            refused=number == errno.ECONNREFUSED,
        )

    def __str__(self) -> str:
        if self.result == "wrong":
            return f"{self.probe}: wrong: expected {self.expected}, found {self.found}"
        return f"{self.probe}: {self.result}" + (f": {self.message}" if self.message else "")


class Interrogation:
    """Asks one engine.

    Args:
        url: the engine's base URL, without ``/v1``.
        model: the name it serves the model under.
        headers: sent with every question, for engines behind a key.
    """

    def __init__(self, url: str, model: str, headers: Mapping[str, str] | None = None) -> None:
        self.url = URL(url)
        self.model = model
        self._headers = headers

    async def put(self, probe: Probe, limit_s: float) -> Verdict:
        """Put one question and judge the answer. Never raises because of the engine."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                expect = probe.expect
                answer = await self.answer(
                    probe.prompt,
                    probe.max_tokens,
                    tokens=expect.tokens is not None or expect.logprobs is not None,
                    token_ids=expect.token_ids is not None,
                )
        except TimeoutError:
            message = f"no answer within {limit_s:g} s"
            return Verdict(probe.name, "late", time.monotonic() - began, message=message)
        except aiohttp.ClientResponseError as error:
            message = f"the engine answers {error.status} {error.message}".rstrip()
            return Verdict(probe.name, "error", time.monotonic() - began, message=message, status=error.status)
        except (aiohttp.ClientError, OSError) as error:
            return Verdict.without_answer(probe, error, time.monotonic() - began)
        return judge(probe, answer, time.monotonic() - began)

    async def put_all(self, probes: Sequence[Probe], limit_s: float) -> list[Verdict]:
        """Put every question, one after the other, up to the first that gets no answer.

        A wrong answer does not end it: all that is wrong should be in the report.
        """
        verdicts: list[Verdict] = []
        for probe in probes:
            verdicts.append(await self.put(probe, limit_s))
            if verdicts[-1].result in ("late", "error"):
                break
        return verdicts

    async def answer(self, prompt: str, max_tokens: int, *, tokens: bool = False, token_ids: bool = False) -> Answer:
        """The engine's answer, with its tokens and their log-probabilities, or their ids, where that is asked for.

        Raises:
            aiohttp.ClientError: it could not be had.
        """
        question: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        if tokens:
            question["logprobs"] = 1
        if token_ids:
            question["return_token_ids"] = True  # vLLM's word, and SGLang's
        return answer_of(await exchange("POST", self.url / "v1/completions", self._headers, question))


async def served_model(url: str, headers: Mapping[str, str] | None = None) -> str:
    """The name of the first model that an engine lists under ``/v1/models``.

    Raises:
        aiohttp.ClientError: it lists none.
    """
    listing = await exchange("GET", URL(url) / "v1/models", headers)
    try:
        return str(listing["data"][0]["id"])
    except (LookupError, TypeError) as error:
        raise NoCompletion(f"it lists no model: {short(listing)}") from error


async def record(
    url: str,
    prompts: Sequence[str],
    *,
    model: str,
    max_tokens: int = 8,
    repeat: int = 3,
    by: By = "text",
    tolerance: float = 0.5,
    limit_s: float = 120.0,
    headers: Mapping[str, str] | None = None,
) -> tuple[Probe, ...]:
    """Record what an engine that is known to be good answers.

    Args:
        repeat: how often each question is put; only an answer that stays the same can be a golden one.
        by: what is compared later: the text, its tokens as text, their ids, or tokens and log-probabilities within
            ``tolerance``.

    Raises:
        ConfigError: ``probe_unstable``, ``probe_empty`` or ``probe_tokens``: this prompt gives no golden answer here.
        aiohttp.ClientError: the engine does not answer.
        TimeoutError: not within ``limit_s``.
    """
    engine = Interrogation(url, model, headers)
    probes = []
    for index, prompt in enumerate(prompts, 1):
        answers = []
        for _ in range(max(1, repeat)):
            async with asyncio.timeout(limit_s):
                answers.append(
                    await engine.answer(
                        prompt, max_tokens, tokens=by in ("tokens", "logprobs"), token_ids=by == "token-ids"
                    )
                )
        _check_golden(prompt, answers, by)
        probes.append(Probe(f"probe-{index}", prompt, max_tokens, _expectation(answers[0], by, tolerance)))
    return tuple(probes)


def _expectation(golden: Answer, by: By, tolerance: float) -> Expectation:
    match by:
        case "text":
            return Expectation(text=golden.text)
        case "token-ids":
            return Expectation(token_ids=golden.token_ids)
        case "tokens":
            return Expectation(tokens=golden.tokens)
    logprobs = tuple(value for value in golden.logprobs or () if value is not None)
    return Expectation(tokens=golden.tokens, logprobs=logprobs, tolerance=tolerance)


def told(error: Exception) -> str:
    """What kept an engine from answering, without what the HTTP client says of itself."""
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.errno or 0
        why = os.strerror(number) if number > 0 else error.strerror
        return f"cannot connect to {error.host}:{error.port}: {why}"
    return f"{type(error).__name__} {error}".strip()


def now_iso() -> str:
    """This moment, for `ProbeSet.recorded_at`."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def judge(probe: Probe, answer: Answer, seconds: float) -> Verdict:
    """Compare an answer with what the probe expects."""
    found = _difference(probe.expect, answer)
    if found is None:
        return Verdict(probe.name, "correct", seconds)
    return Verdict(probe.name, "wrong", seconds, expected=str(probe.expect), found=found)


_ROUNDED: Final = 0.01
"""No logarithm of a probability is above 0 by more than this."""


def _difference(expect: Expectation, answer: Answer) -> str | None:
    if expect.text is not None:
        return None if answer.text == expect.text else repr(answer.text)
    if expect.regex is not None:
        return None if re.search(expect.regex, answer.text) else repr(answer.text)
    if expect.tokens is not None and answer.tokens != expect.tokens:
        return _tokens(answer.tokens)
    if expect.token_ids is not None and answer.token_ids != expect.token_ids:
        return _tokens(answer.token_ids)
    if expect.logprobs is None:
        return None
    found = answer.logprobs or ()
    if len(found) != len(expect.logprobs):
        return f"{len(found)} log-probabilities"
    for index, (ours, theirs) in enumerate(zip(expect.logprobs, found, strict=True)):
        if theirs is None or not -math.inf < theirs < _ROUNDED or abs(ours - theirs) > expect.tolerance:
            return f"log-probability {theirs} of token {index}, recorded as {ours} (tolerance {expect.tolerance:g})"
    return None


def _tokens(found: Sequence[object] | None) -> str:
    return "no tokens in the answer" if found is None else f"the tokens {list(found)}"


def _check_golden(prompt: str, answers: Sequence[Answer], by: By) -> None:
    first = answers[0]
    for other in answers[1:]:
        if (other.text, other.tokens, other.token_ids) != (first.text, first.tokens, first.token_ids):
            raise ConfigError(
                "probe_unstable",
                f"the answer to {short(prompt)} does not stay the same",
                expected=repr(first.text),
                found=repr(other.text),
                remedy="Use another prompt or fewer tokens, and record while nothing else uses the engine",
            )
    if not first.text.strip():
        raise ConfigError(
            "probe_empty",
            f"the answer to {short(prompt)} is empty",
            expected="some text",
            found=repr(first.text),
            remedy="Use another prompt or more tokens",
        )
    finite = all(value is not None and math.isfinite(value) for value in first.logprobs or ())
    if by != "text" and not (first.token_ids if by == "token-ids" else first.tokens and finite):
        raise ConfigError(
            "probe_tokens",
            f"the answer to {short(prompt)} comes without usable {'ids' if by == 'token-ids' else 'log-probabilities'}",
            expected=(
                "choices[0].token_ids, as return_token_ids asks for"
                if by == "token-ids"
                else "choices[0].logprobs with tokens and finite token_logprobs"
            ),
            found=short(first.token_ids if by == "token-ids" else (first.tokens, first.logprobs)),
            remedy="Record by text",
        )
