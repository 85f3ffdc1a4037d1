"""The reference engine with everything imported beforehand, so that restarts are forked, not started.

Every answer names the process it came from, and when that received the request and began the answer, in ``x-engine``:
that is how an answer of an engine that nobody had verified is told from others. Run as ``python -m gate_parts.engine``,
with the options of ``readmit engine``.
"""

import os

import transformers.models.llama.modeling_llama
import transformers.models.llama.tokenization_llama  # noqa: F401 - what the demo model's start would import
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import readmit.completions
import readmit.generation
import readmit.server
import weightcache.integrations.transformers  # noqa: F401
from readmit import engine
from weightcache.journal import boottime_ns


class Named:
    """An application whose responses name this process."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        received = boottime_ns()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                told = f"{os.getpid()} {received} {boottime_ns()}"
                message["headers"] = [*message["headers"], (b"x-engine", told.encode())]
            await send(message)

        await self._app(scope, receive, named)


class NamedCompletions(readmit.completions.CompletionsAPI):
    """The engine's API, named."""

    def app(self) -> ASGIApp:  # type: ignore[override]
        return Named(super().app())


if __name__ == "__main__":
    readmit.completions.CompletionsAPI = NamedCompletions  # type: ignore[misc]
    engine.main()
