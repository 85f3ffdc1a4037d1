"""Passes requests on to the engine: plain ASGI, bodies unread, connections kept only as long as the engine's lease.

What a client must be able to rely on: a response that ends cleanly is whole. When an engine dies in the middle of one,
an event stream gets an error event, and the connection is broken off rather than ended. (For a client that speaks
HTTP/1.0, as nginx does unless told otherwise, a response may end with its connection; there only the event tells.)
"""

import asyncio
import errno
import json
import time
from collections.abc import Awaitable
from http import HTTPStatus
from typing import Final, TypeVar

import aiohttp
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

from readmit.gate.gate import Gate
from readmit.gate.headers import OURS, SAID_ANEW, Headers, as_text, end_to_end, header_of, is_answer
from readmit.gate.problem import Problem
from readmit.gate.slots import Lease, Slot
from readmit.gate.trace import Trace
from readmit.gate.upload import Upload
from weightcache.journal import boottime_ns

T = TypeVar("T")

BREAKING: Final = frozenset(("hang", "wrong_answer", "foreign_listener"))
"""Why a slot was taken out of service, where what it still answers must not reach a client, or never comes."""
IMMEDIATE_FAIL: Final = (b"x-envoy-immediate-health-check-fail", b"true")
"""On what the gate refuses while it is not ready: Envoy then sends it nothing more until a health check succeeds."""
KEPT_S: Final = 1.0
"""How long a connection is kept for the next request. uvicorn, and so vLLM, closes its own after 5 s: a request must
not meet a connection that the engine is about to close, for then nobody knows whether it may be repeated."""
LAST_WORDS_S: Final = 0.002
"""For what an engine had sent before it began to exit: that has arrived, and only needs to be read. Its connections
may end seconds later."""
CONNECT_LIMIT_S: Final = 2.0
"""An engine on this node that does not take a connection in this time has a full queue."""


class Proxy:
    """The ASGI application behind ``/v1``.

    Args:
        gate: says where a request may go.
    """

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self._pools: dict[str, _Pool] = {}

    async def close(self) -> None:
        """Break off what is still open."""
        for pool in self._pools.values():
            await pool.session.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trace = Trace.continued(scope["headers"])
        outcome = await self._answer(scope, receive, send, trace)
        self.gate.metrics.requests.labels(outcome).inc()

    async def _answer(self, scope: Scope, receive: Receive, send: Send, trace: Trace) -> str:
        tried: list[Slot] = []
        failed: _NotTaken | None = None
        upload = Upload(scope, receive)
        deadline = asyncio.get_running_loop().time() + self.gate.hold.max_wait_s
        while True:
            refusal = self.gate.refusal(trace.trace_id)
            slot = self.gate.choose(tried) if refusal is None else None
            if slot is None:
                if await self.gate.hold.wait(refusal and refusal.problem, deadline, upload):
                    tried.clear()
                    continue
                if upload.gone:
                    return "client_gone"
                break
            try:
                pool = await self.pool(slot)
                pool.users += 1
                try:
                    with self.gate.carrying(slot):
                        return await _Exchange(self.gate, slot, pool, scope, upload, send, trace).run()
                finally:
                    await pool.leave()
            except _LeaseEnded:
                continue
            except _NotTaken as error:
                # Not a byte has left the client's request, or it may be repeated: another slot may have it.
                tried.append(slot)
                failed = error
                if error.refused:
                    self.gate.refused(slot)
                else:
                    self.gate.doubt(slot)
        if failed is not None and failed.problem is not None:
            problem, outcome = failed.problem, "engine_died"
        elif refusal is not None:
            problem, outcome = refusal.problem, "engine_refused" if tried else refusal.outcome
        else:
            problem, outcome = self.gate.no_connection(trace.trace_id), "engine_refused"
        unready = [IMMEDIATE_FAIL] if problem.status == HTTPStatus.SERVICE_UNAVAILABLE else []
        await problem.send(send, scope["path"], [_traceresponse(trace), *unready])
        return outcome

    async def pool(self, slot: Slot) -> "_Pool":
        """The connections to a slot's engine: new ones with every lease, so that only who holds it answers."""
        pool = self._pools.get(slot.name)
        if pool is None or pool.lease is not slot.lease:
            self._pools[slot.name] = _Pool(slot.lease)
            if pool is not None:
                await pool.retire()
        return self._pools[slot.name]


class _Pool:
    """Connections to the engine that holds a lease; made on the running event loop."""

    def __init__(self, lease: Lease | None) -> None:
        self.lease = lease
        self.users = 0
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(keepalive_timeout=KEPT_S, limit=0),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_LIMIT_S),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )
        self._retired = False

    async def retire(self) -> None:
        """The lease has ended: close as soon as nobody needs it any more."""
        self._retired = True
        if not self.users:
            await self.session.close()

    async def leave(self) -> None:
        """One user less."""
        self.users -= 1
        if self._retired and not self.users:
            await self.session.close()


class _Exchange:
    """One request and its response."""

    def __init__(
        self,
        gate: Gate,
        slot: Slot,
        pool: _Pool,
        scope: Scope,
        upload: Upload,
        send: Send,
        trace: Trace,
    ) -> None:
        self._gate = gate
        self._settings = gate.settings
        self._slot = slot
        self._pool = pool
        self._scope = scope
        self._upload = upload
        self._send = send
        self._trace = trace
        self._asked_ns = boottime_ns()
        self._begun: Headers | None = None
        """The response's headers, once they have gone to the client."""
        self._tail = b""
        self._complete = False
        self._ended: str | None = None
        """Why it was broken off: ``client_gone``, or for what its slot was taken out of service."""
        self._task: asyncio.Task[object] | None = None
        self._put = False
        """Whether the engine may have seen anything of it."""
        self._exits = False
        self._patience: asyncio.Timeout | None = None
        """While the engine has to do something."""

    async def run(self) -> str:
        """Carry it out; drop it as soon as the client has gone, break it off when the engine is taken out of service.

        Returns:
            How it ended.

        Raises:
            _NotTaken: the engine took no connection, or gave no answer to what may be asked again.
            _LeaseEnded: the engine was taken out of service before it was asked.
        """
        self._task = asyncio.current_task()
        watching = asyncio.create_task(self._watch_client())
        self._slot.carried.add(self._eject)
        try:
            return await self._carry()
        except asyncio.CancelledError:
            # Its own doing, by which the connection to the engine was closed: so the engine learns that nobody waits.
            if self._ended is None or self._task is None:
                raise
            self._task.uncancel()
        finally:
            self._slot.carried.discard(self._eject)
            watching.cancel()
        if self._ended != "client_gone":
            return await self._ejected(self._ended)
        if not self._tail:
            self._gate.neglected(self._slot, self._upload)
        return "client_gone"

    async def _watch_client(self) -> None:
        await self._upload.disconnected()
        self._break_off("client_gone")

    def _eject(self, reason: str) -> None:
        if reason in BREAKING:
            self._break_off(reason)
        elif reason == "engine_exited":
            self._exits = True
            self._hurry()

    def _hurry(self) -> None:
        """Give up soon, once what has arrived has been read."""
        if self._patience is not None:
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self._give_up, self._patience, 2)

    def _give_up(self, patience: asyncio.Timeout, turns: int) -> None:
        loop = asyncio.get_running_loop()
        if turns:
            # Timers come before what has arrived, and both are due where this process did not run for a while.
            loop.call_soon(self._give_up, patience, turns - 1)
        elif patience is self._patience and not patience.expired():
            patience.reschedule(loop.time())

    def _break_off(self, why: str) -> None:
        if self._ended is None and not self._complete and self._task is not None:
            self._ended = why
            self._task.cancel()

    async def _carry(self) -> str:
        gate, began = self._gate, time.monotonic()
        try:
            response = await self._within(self._settings.first_byte_limit_s, self._request())
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise _NotTaken(refused=isinstance(error, OSError) and error.errno == errno.ECONNREFUSED) from error
        except TimeoutError:
            limit = f"{self._settings.first_byte_limit_s:g} s"
            if self._upload.whole_s is None:
                await self._fail(
                    Problem(408, "upload-late", f"This request did not come whole within {limit}.", close=True)
                )
                return "client_gone"
            gate.neglected(self._slot, self._upload)
            gate.doubt(self._slot)
            await self._fail(Problem(504, "engine-late", f"The engine has not begun its response within {limit}."))
            return "first_byte_late"
        except (aiohttp.ClientError, OSError) as error:
            if not self._put:
                raise _LeaseEnded from error
            gate.doubt(self._slot)
            detail = f"The engine broke off before it had answered ({type(error).__name__})."
            problem = Problem(502, "engine-died", f"{detail} The request may have been worked on.")
            if self._upload.repeatable:
                raise _NotTaken(refused=False, problem=problem) from error
            await self._fail(problem)
            return "engine_died"
        gate.metrics.first_byte.observe(time.monotonic() - began)
        try:
            return await self._relay(response)
        finally:
            response.close()

    async def _request(self) -> aiohttp.ClientResponse:
        scope = self._scope
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        headers = [(as_text(name), as_text(value)) for name, value in end_to_end(scope["headers"]) if name not in OURS]
        data = await self._upload.body()
        if self._slot.lease is not self._pool.lease:
            raise _LeaseEnded
        self._put = True
        states = [("tracestate", as_text(value)) for value in self._trace.states]
        response = await self._pool.session.request(
            scope["method"],
            URL(self._slot.url.rstrip("/") + target.decode("ascii"), encoded=True),
            headers=[*headers, ("traceparent", self._trace.header()), *states],
            data=data,
            allow_redirects=False,
        )
        if not is_answer(response):
            response.close()
            raise aiohttp.ClientPayloadError(f"no answer: status {response.status}, {response.raw_headers}")
        return response

    async def _relay(self, response: aiohttp.ClientResponse) -> str:
        headers = [(name.lower(), value) for name, value in response.raw_headers]
        kept = [(name, value) for name, value in end_to_end(headers) if name not in SAID_ANEW]
        kept.append(_traceresponse(self._trace))
        await self._send({"type": "http.response.start", "status": response.status, "headers": kept})
        self._begun = headers
        content, generated = response.content, self._upload.generates and response.status < HTTPStatus.BAD_REQUEST
        try:
            while not self._complete:
                # Empty when the engine has sent everything.
                chunk = content.read_nowait() or await self._within(self._settings.idle_limit_s, content.readany())
                if generated and not self._tail:
                    self._gate.neglect.answered(self._slot.name)
                self._complete = content.at_eof()
                # Waits while the client reads more slowly than the engine writes; the engine then waits as well.
                await self._send(_body(chunk, more=not self._complete))
                self._tail = (self._tail + chunk)[-2:]
        except TimeoutError:
            if not self._tail:  # its headers came at once, as of a stream
                self._gate.neglected(self._slot, self._upload)
            self._gate.doubt(self._slot)
            message = f"The engine has sent nothing for {self._settings.idle_limit_s:g} s."
            await self._cut_off(headers, Problem(504, "engine-stalled", message))
            return "stalled"
        except (aiohttp.ClientError, OSError):
            self._gate.doubt(self._slot)
            message = "The engine died in the middle of this response."
            await self._cut_off(headers, Problem(502, "engine-died", message))
            return "cut_off"
        if generated:
            self._slot.answered_ns = max(self._slot.answered_ns, self._asked_ns)
        return "answered"

    async def _within(self, limit_s: float, done: Awaitable[T]) -> T:
        """What the engine does next.

        Raises:
            TimeoutError: not within the limit.
            aiohttp.ServerDisconnectedError: its process exits.
        """
        try:
            async with asyncio.timeout(limit_s) as self._patience:
                if self._exits:
                    self._hurry()
                return await done
        except TimeoutError as error:
            if not self._exits or isinstance(error, aiohttp.ClientError):
                raise
            raise aiohttp.ServerDisconnectedError from error
        finally:
            self._patience = None

    async def _fail(self, problem: Problem) -> None:
        await problem.send(self._send, self._scope["path"], [_traceresponse(self._trace)])
        self._complete = True

    async def _ejected(self, reason: str) -> str:
        """Nothing this engine says counts any more."""
        if not self._put:
            raise _LeaseEnded
        what = f"The engine was taken out of service ({reason.replace('_', ' ')})"
        if self._begun is not None:
            problem = Problem(502, "engine-ejected", f"{what} in the middle of this response.")
            await self._cut_off(self._begun, problem)
            return "cut_off"
        problem = Problem(502, "engine-ejected", f"{what} before it had answered. The request may have been worked on.")
        if self._upload.repeatable:
            raise _NotTaken(refused=False, problem=problem)
        await self._fail(problem)
        return "engine_died"

    async def _cut_off(self, headers: Headers, problem: Problem) -> None:
        """Say so in an event stream. Whatever it is, it stays unfinished, so that the server breaks the connection."""
        stream = (header_of(headers, b"content-type") or b"").startswith(b"text/event-stream")
        if stream and header_of(headers, b"content-length") is None and header_of(headers, b"content-encoding") is None:
            event = b"event: error\ndata: " + json.dumps({"error": problem.error}).encode() + b"\n\n"
            await self._send(_body(event if self._tail in (b"\n\n", b"") else b"\n\n" + event, more=True))


class _NotTaken(Exception):
    """Another slot may have the request.

    Args:
        refused: whether the engine refused the connection; False where it, or this machine, only had no room for one.
        problem: what the client is told where there is no other slot, if this engine may have worked on the request.
    """

    def __init__(self, *, refused: bool, problem: Problem | None = None) -> None:
        self.refused = refused
        self.problem = problem
        super().__init__(refused)


class _LeaseEnded(Exception):
    """The request has not been put to any engine: who is ready now may have it."""


def _traceresponse(trace: Trace) -> tuple[bytes, bytes]:
    return b"traceresponse", trace.header().encode()


def _body(chunk: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": more}
