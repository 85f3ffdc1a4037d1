"""The OpenAI-compatible completions API over one `Generator`.

``/v1/completions`` (whole and streamed), ``/v1/models`` and ``/health``. Requests wait in line for one worker thread;
a request whose client has gone is dropped at its next token. Field names and error objects are OpenAI's:
https://platform.openai.com/docs/api-reference/completions.
"""

import asyncio
import itertools
import re
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from readmit.generation import Generator, Sampling, Step

MAX_LOGPROBS: Final = 20
"""Alternatives a token; vLLM's limit, above OpenAI's 5."""


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class CompletionRequest(msgspec.Struct, frozen=True):
    """The fields of a request that this engine knows; it ignores others, as compatible servers do."""

    prompt: str | list[int]
    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=1)] = 16
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    seed: Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)] | None = None
    stop: str | Annotated[list[str], Meta(max_length=4)] = []
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: Annotated[int, Meta(ge=1, le=1)] = 1
    best_of: Annotated[int, Meta(ge=1, le=1)] = 1
    echo: bool = False
    ignore_eos: bool = False
    return_token_ids: bool = False

    def sampling(self) -> Sampling:
        """How to generate what was asked for."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        return Sampling(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=tuple(filter(None, stop)),
            logprobs=self.logprobs,
            ignore_eos=self.ignore_eos,
        )


class RequestError(Exception):
    """A request that cannot be served: an HTTP status and OpenAI's error object."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        self.status = status
        self.body = {"error": {"message": message, "type": _error_type(status), "param": param, "code": code}}
        super().__init__(message)


class Completion:
    """One answer as it grows: its identity, its token counts and the shape of its chunks."""

    def __init__(self, model: str, prompt: list[int], word: Callable[[int], str], *, token_ids: bool) -> None:
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._word = word
        self._token_ids = token_ids
        self._prompt_tokens = len(prompt)
        self._tokens = 0
        self._offset = 0

    def chunk(self, steps: list[Step]) -> dict[str, Any]:
        """The JSON object for the steps since the last chunk (for all of them, when not streaming)."""
        text = "".join(step.text for step in steps)
        offsets = itertools.accumulate((len(step.text) for step in steps), initial=self._offset)
        logprobs = None
        if steps and steps[0].top is not None:
            logprobs = {
                "tokens": [self._word(step.token) for step in steps],
                "token_logprobs": [step.logprob for step in steps],
                "top_logprobs": [step.top for step in steps],
                "text_offset": list(offsets)[:-1],
            }
        self._tokens += len(steps)
        self._offset += len(text)
        finish = steps[-1].finish if steps else None
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}
        if self._token_ids:
            choice["token_ids"] = [step.token for step in steps]
        return {**self._head, "choices": [choice]}

    def usage(self) -> dict[str, int]:
        """Token counts so far."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._tokens,
            "total_tokens": self._prompt_tokens + self._tokens,
        }

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream whose client asked for usage: no choices."""
        return {**self._head, "choices": [], "usage": self.usage()}


class CompletionsAPI:
    """The routes, bound to one model.

    Args:
        generator: produces the tokens, in one worker thread.
        model: the name the model is served under.
    """

    def __init__(self, generator: Generator, model: str) -> None:
        self._generator = generator
        self._model = model
        self._created = int(time.time())
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="generate")

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/health", self.health),
            ],
            exception_handlers={RequestError: _request_error, HTTPException: _http_error, 500: _server_error},
        )

    async def health(self, request: Request) -> Response:
        """The server is up. Whether answers are right is for the gate to find out."""
        return Response()

    async def models(self, request: Request) -> Response:
        """The one model."""
        model = {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "readmit",
            "max_model_len": self._generator.context,
        }
        return _json({"object": "list", "data": [model]})

    async def complete(self, request: Request) -> Response:
        """Answer a prompt, in one piece or as server-sent events."""
        asked = _parse(await request.body())
        if asked.model not in (None, self._model):
            message = f"the model {asked.model!r} does not exist; this engine serves {self._model!r}"
            raise RequestError(message, status=404, param="model", code="model_not_found")
        prompt = self._prompt(asked)
        completion = Completion(self._model, prompt, self._generator.word, token_ids=asked.return_token_ids)
        if asked.stream:
            events = self._events(completion, prompt, asked)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        steps = []
        async with aclosing(self._steps(prompt, asked.sampling())) as arriving:
            async for step in arriving:
                steps.append(step)
                if await request.is_disconnected():
                    return Response(status_code=499)  # nobody reads it; nginx's code for a client that went away
        return _json({**completion.chunk(steps), "usage": completion.usage()})

    async def _events(
        self, completion: Completion, prompt: list[int], asked: CompletionRequest
    ) -> AsyncIterator[bytes]:
        async with aclosing(self._steps(prompt, asked.sampling())) as arriving:
            async for step in arriving:
                chunk = completion.chunk([step])
                if step.text or step.top is not None or step.finish or asked.return_token_ids:
                    yield _event(chunk)
        if asked.stream_options.include_usage:
            yield _event(completion.usage_chunk())
        yield b"data: [DONE]\n\n"

    async def _steps(self, prompt: list[int], sampling: Sampling) -> AsyncGenerator[Step, None]:
        """The steps of one generation, handed over from the worker thread; leaving early ends it there."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Step | None] = asyncio.Queue()
        abandoned = threading.Event()

        def generate() -> None:
            if abandoned.is_set():
                return
            for step in self._generator.stream(prompt, sampling):
                if abandoned.is_set():
                    return
                loop.call_soon_threadsafe(arrived.put_nowait, step)

        work = loop.run_in_executor(self._worker, generate)
        work.add_done_callback(lambda _: arrived.put_nowait(None))
        try:
            while (step := await arrived.get()) is not None:
                yield step
            await work  # raises what the thread raised
        finally:
            abandoned.set()

    def _prompt(self, asked: CompletionRequest) -> list[int]:
        prompt = self._generator.encode(asked.prompt) if isinstance(asked.prompt, str) else asked.prompt
        vocabulary = self._generator.model.config.vocab_size
        if not prompt or not all(0 <= token < vocabulary for token in prompt):
            message = f"the prompt needs at least one token, each from 0 to {vocabulary - 1}"
            raise RequestError(message, param="prompt")
        if len(prompt) + asked.max_tokens > self._generator.context:
            message = (
                f"this model's context is {self._generator.context} tokens; "
                f"{len(prompt)} in the prompt and {asked.max_tokens} to generate are too many"
            )
            raise RequestError(message, param="max_tokens", code="context_length_exceeded")
        return prompt


def _parse(body: bytes) -> CompletionRequest:
    try:
        fields = msgspec.json.decode(body)
        if isinstance(fields, dict):  # null means the default
            fields = {key: value for key, value in fields.items() if value is not None}
        asked = msgspec.convert(fields, CompletionRequest)
    except msgspec.MsgspecError as error:
        place = re.search(r"\$\.(\w+)", str(error)) or re.search(r"field `(\w+)`", str(error))
        raise RequestError(str(error), param=place and place[1]) from error
    if asked.echo:
        raise RequestError("this engine does not repeat the prompt: echo must be false", param="echo")
    return asked


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _event(content: object) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def _error_type(status: int) -> str:
    return "server_error" if status >= 500 else "invalid_request_error"


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _json(error.body, error.status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return _json(RequestError(message, status=error.status_code).body, error.status_code)


async def _server_error(request: Request, error: Exception) -> Response:
    message = f"the engine failed on this request: {type(error).__name__}: {error}"
    return _json(RequestError(message, status=500).body, 500)
