"""What is said over HTTP to an engine: one question, one answer, one connection."""

import json
from collections.abc import Mapping
from typing import Any, Final

import aiohttp
import msgspec
from yarl import URL

ANSWER_BYTES_LIMIT: Final = 1 << 20
"""No answer to a probe is longer; what is, comes from something that is no completions API."""

BROKEN_OFF: Final = ("abort", "error")
"""How vLLM and SGLang end a completion that they could not carry on; what there is of it may look right."""


class Answer(msgspec.Struct, frozen=True):
    """What an engine said: its text, and tokens, their log-probabilities and ids where they were asked for."""

    text: str
    tokens: tuple[str, ...] | None = None
    logprobs: tuple[float | None, ...] | None = None
    token_ids: tuple[int, ...] | None = None


class NoCompletion(aiohttp.ClientError):
    """Something answered, but not what a completions API answers."""


async def exchange(method: str, url: URL, headers: Mapping[str, str] | None, body: object = None) -> Any:
    """One request and its JSON.

    Raises:
        aiohttp.ClientError, OSError: no answer, an HTTP error, or something that is no JSON.
    """
    # A connector of its own, closed with it: the reply on it can be to nothing else.
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
        session.request(
            method, url, json=body, headers=headers, allow_redirects=False, timeout=aiohttp.ClientTimeout()
        ) as response,
    ):
        raw = b""
        async for chunk in response.content.iter_any():
            raw += chunk
            if len(raw) > ANSWER_BYTES_LIMIT:
                raise NoCompletion(f"more than {ANSWER_BYTES_LIMIT} bytes")
        if response.status != 200:
            said = ": ".join(filter(None, (response.reason, complaint(raw))))
            raise aiohttp.ClientResponseError(response.request_info, (), status=response.status, message=said)
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise NoCompletion(f"not JSON: {short(raw)}") from error


def complaint(raw: bytes) -> str | None:
    """What an engine says of its refusal, as OpenAI's API has it or, as some do, without the ``error`` around it."""
    try:
        reply = json.loads(raw)
        return str(reply.get("error", reply)["message"])[:200]
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None


def answer_of(reply: Any) -> Answer:
    """The answer in a completion: the one choice that was asked for, carried to its end.

    Raises:
        NoCompletion: it is none.
    """
    try:
        (choice,) = reply["choices"]
        if reply.get("error") or choice.get("finish_reason") in BROKEN_OFF:
            raise NoCompletion(f"an error, and status 200: {short(reply)}")
        marks = choice.get("logprobs")
        return msgspec.convert(
            {
                "text": choice["text"],
                "tokens": marks and marks["tokens"],
                "logprobs": marks and marks["token_logprobs"],
                "token_ids": choice.get("token_ids"),
            },
            Answer,
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:  # msgspec.ValidationError is a ValueError
        raise NoCompletion(f"no completion: {short(reply)}") from error


def short(thing: object, limit: int = 200) -> str:
    """Something as it is shown to people."""
    text = repr(thing)
    return text if len(text) <= limit else text[:limit] + "..."
