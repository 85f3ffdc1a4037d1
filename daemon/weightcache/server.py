"""The server: one Unix socket, many clients at once, each served by a task of its own."""

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from weightcache import messages
from weightcache.channel import Channel, Hangup
from weightcache.errors import CacheMiss, ProtocolError, ResourceError
from weightcache.frames import NOBODY, close_all, missed_from, version_mismatch
from weightcache.journal import Context
from weightcache.load import LoadWorker
from weightcache.memory import resident_bytes
from weightcache.registry import Claim, Generation, Lease, holders
from weightcache.residency import Residency
from weightcache.suspicion import FAILURES, failures
from weightcache.version import VERSION

MAX_CONNECTIONS: Final = 512
BACKLOG: Final = 128
_ACCEPT_PAUSE_S: Final = 0.1
_KEEPER_LIMIT_S: Final = 0.5
_PROGRESS_EVERY_S: Final = 0.5
_log: Final = logging.getLogger("weightcache.server")


class Session:
    """What one connection holds: a context, at most one claim and one lease."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.context: Context | None = None
        self.claim: Claim | None = None
        self.generation: Generation | None = None
        self.lease: Lease | None = None

    @property
    def holds_something(self) -> bool:
        return self.claim is not None or self.lease is not None


class Server:
    """Serves one listening Unix socket.

    Args:
        path: where it listens, for those who ask.
        listener: bound; `Server.start` listens on it.
        residency: what it serves.
        uids: who may connect.
    """

    def __init__(self, path: Path, listener: socket.socket, residency: Residency, uids: frozenset[int]) -> None:
        self.path = path
        self.residency = residency
        self.registry = residency.registry
        self.uids = uids
        self._listener = listener
        self._started = time.monotonic()
        self._sessions: dict[asyncio.Task[None], Session] = {}
        self._changed = asyncio.Event()
        self._stopping = False

    def start(self) -> None:
        """Listen and accept from now on."""
        self._listener.setblocking(False)
        # Until listen is called again, SO_PEERCRED shows clients the process that called it first, perhaps long dead.
        self._listener.listen(BACKLOG)
        self._accept_on()

    async def stop(self) -> None:
        """Accept no more and end every connection; leases that a keeper stores go on without us."""
        self._stopping = True
        asyncio.get_running_loop().remove_reader(self._listener)
        for task in list(self._sessions):
            task.cancel()
        await asyncio.gather(*self._sessions, return_exceptions=True)

    def adopt_lease(self, name: str, descriptor: int, context: Context | None) -> None:
        """Serve a client whose connection the keeper kept while there was no daemon; it has noticed nothing.

        Args:
            name: of the lease.
            descriptor: the connection, taken over.
            context: of the client, None where nothing is known of it.
        """
        session = Session(Channel(socket.socket(fileno=descriptor)))
        adopted = self.residency.adopt_lease(name, session.channel.peer.pid, context)
        if adopted is None:
            session.channel.close()
            return
        session.generation, session.lease = adopted
        session.context = context or self.residency.journal.context
        self._run(session)

    def store_everything(self) -> None:
        """Leave every descriptor with the keeper."""
        deposit = self.residency.deposit
        deposit.store([("listen", self._listener.fileno())])
        self.residency.store_everything()
        for session in self._sessions.values():
            if session.lease is not None:
                deposit.store([(session.lease.name, session.channel.connection.fileno())], poll=True)

    def _accept_on(self) -> None:
        if not self._stopping:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # no descriptor is free: the client stays in the backlog until one is
            _log.error("cannot accept a connection: %s", error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)  # it stays readable: without a pause this would spin
            loop.call_later(_ACCEPT_PAUSE_S, self._accept_on)
            return
        self._run(Session(Channel(connection)))

    def _run(self, session: Session) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(session))
        self._sessions[task] = session
        task.add_done_callback(lambda done: self._sessions.pop(done, None))

    async def _serve(self, session: Session) -> None:
        channel = session.channel
        try:
            self._admit(session)
            while True:
                request, descriptors = await channel.receive(may_be_silent=session.holds_something)
                try:
                    await self._answer(session, request, descriptors)
                finally:
                    close_all(descriptors)
                await asyncio.sleep(0)  # or one client that asks fast enough would be the only one served
        except Hangup as reason:
            _log.debug("pid %d: %s", channel.peer.pid, reason)
            if reason.late:
                self.registry.refused["timeout"] += 1
        except CacheMiss as miss:  # of the connection itself: it ends once the client has been told
            place = session.context._asdict() if session.context else None
            _log.warning("pid %d (uid %d): %s", channel.peer.pid, channel.peer.uid, miss, extra=place)
            self.registry.refused[miss.reason] += 1
            with contextlib.suppress(Hangup, CacheMiss):
                await channel.send(missed_from(miss))
        finally:
            self._end(session)

    def _admit(self, session: Session) -> None:
        peer = session.channel.peer
        if peer.uid == NOBODY or peer.uid not in self.uids:
            raise CacheMiss(
                "peer_refused",
                f"uid {peer.uid} may not use this weight cache",
                expected=f"one of {sorted(self.uids)}",
                found=peer.uid,
                remedy="Run engine and daemon as one user, or start the daemon with --allow-uid",
            )
        if len(self._sessions) > MAX_CONNECTIONS:
            raise CacheMiss("timeout", "the daemon is busy", expected=f"at most {MAX_CONNECTIONS} connections")

    def _end(self, session: Session) -> None:
        self._drop_claim(session)
        # A daemon that is restarted in an orderly way must find its leases again, as one that was killed does.
        if not (self._stopping and self.residency.deposit.active):
            self._end_lease(session)
        session.channel.close()

    def _drop_claim(self, session: Session) -> None:
        if session.claim is not None:
            self.registry.claims.remove(session.claim)
            session.claim = None
            self._wake()

    def _end_lease(self, session: Session) -> None:
        if session.lease is not None and session.generation is not None:
            self.residency.close_lease(session.generation, session.lease, session.context)
        session.lease = session.generation = None

    async def _open_lease(self, session: Session, generation: Generation) -> None:
        assert session.context is not None
        self._end_lease(session)
        channel = session.channel
        session.generation = generation
        session.lease, stored = self.residency.open_lease(
            generation, channel.peer.pid, channel.connection.fileno(), session.context
        )
        await self._until_kept([stored])

    async def _until_kept(self, told: "list[Future[bool]]") -> None:
        """Wait until the keeper has done what it was told, within limits: one that is stopped must not stop engines."""
        if told:
            await asyncio.wait([asyncio.wrap_future(future) for future in told], timeout=_KEEPER_LIMIT_S)

    async def _answer(self, session: Session, request: messages.Request, descriptors: list[int]) -> None:
        channel = session.channel
        if isinstance(request, messages.Hello):
            await self._greet(session, request)
            return
        if session.context is None:
            raise ProtocolError("protocol", "the first message must be a greeting", found=type(request).__name__)
        try:
            if isinstance(request, messages.Attach):
                await self._attach(session, request)
            elif isinstance(request, messages.Progress):
                if session.claim is not None:
                    session.claim.done, session.claim.total = request.done, request.total
            elif isinstance(request, messages.Load):
                await self._load(session, request)
            elif isinstance(request, messages.Publish):
                await channel.send(await self._publish(session, descriptors))
            else:
                await channel.send(await self._reply(session, request))
        except CacheMiss as miss:
            await channel.send(missed_from(miss))
        except Hangup:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the client must hear of it, not see the stream end
            _log.exception("pid %d: a %s failed", channel.peer.pid, type(request).__name__)
            await channel.send(missed_from(_failure(error, request)))

    async def _greet(self, session: Session, hello: messages.Hello) -> None:
        if hello.protocol != messages.PROTOCOL:
            raise version_mismatch(hello.protocol, f"the client with pid {session.channel.peer.pid}")
        if session.context is not None:
            raise ProtocolError("protocol", "a client greets once", found="a second greeting")
        node = hello.node or self.residency.journal.context.node
        session.context = Context(node, hello.slot, hello.episode, hello.attempt, hello.rank)
        await session.channel.send(messages.Welcome(version=VERSION, instance=self.residency.instance))

    async def _reply(self, session: Session, request: messages.Request) -> messages.Reply:
        if isinstance(request, messages.Claim):
            return await self._claim(session, request)
        if isinstance(request, messages.Status):
            return messages.Done(data=self.describe())
        if isinstance(request, messages.Explain):
            return messages.Done(data=self.explain(request.config, request.device))
        if isinstance(request, messages.Release):
            return messages.Done(data={"released": await self._release(request)})
        if isinstance(request, messages.Quarantine):
            reason = None if request.lift else request.reason
            generation = self.residency.quarantine(request.generation, reason, session.context)
            return messages.Done(data=generation.describe())
        raise ProtocolError("protocol", "the daemon has no answer to this message", found=type(request).__name__)

    async def _attach(self, session: Session, request: messages.Attach) -> None:
        deadline = time.monotonic() + request.wait_s
        while True:
            try:
                generation = self.registry.find(request.config, request.device)
                if self._suspect(session, generation):
                    continue
                break
            except CacheMiss as miss:
                left = deadline - time.monotonic()
                if miss.reason != "daemon_loading" or left <= 0:
                    raise
                facts = miss.data
                await session.channel.send(
                    messages.Loading(
                        pid=facts["pid"], done=facts["done"], total=facts["total"], elapsed_s=facts["elapsed_s"]
                    )
                )
                await self._wait_for_change(min(left, _PROGRESS_EVERY_S))
        await self._open_lease(session, generation)
        attached = messages.Attached(generation=generation.name, descriptors=len(generation.descriptors))
        try:
            await session.channel.send(attached, generation.descriptors)
        except ResourceError:
            self._end_lease(session)
            raise
        generation.hits += 1

    def _suspect(self, session: Session, generation: Generation) -> bool:
        """Whether engines of this client's slot failed on these weights too often; then they are in quarantine."""
        client = session.context
        if client is None or client.slot is None:
            return False
        failed = failures(self.residency.journal, generation.name, client)
        if len(failed) < FAILURES:
            return False
        reason = f"{len(failed)} failed attempts in a row on it: {', '.join(failed)}"
        _log.warning("generation %s is quarantined: %s", generation.name, reason, extra=client._asdict())
        self.residency.quarantine(generation.name, reason, client)
        return True

    def _wake(self) -> None:
        """Let those look again who wait for a load."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_for_change(self, limit_s: float) -> None:
        changed = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await changed.wait()

    async def _claim(self, session: Session, request: messages.Claim) -> messages.Claimed:
        self._drop_claim(session)
        session.claim = self.registry.claim(request.config, session.channel.peer.pid, request.device)
        session.claim.total = request.bytes
        stale = self.registry.stale(session.claim) if request.replace else []
        if stale and not self._could_fit(request.bytes):
            stale = [generation for generation in stale if generation.quarantined]
        await self._until_kept([self.residency.release(generation.name, "replaced") for generation in stale])
        return messages.Claimed(released=[generation.name for generation in stale])

    def _could_fit(self, size: int) -> bool:
        """Whether room for it can be made; what will not fit is no reason to give up what serves meanwhile."""
        try:
            self.registry.make_room(size)
        except ResourceError:
            return False
        return True

    async def _publish(self, session: Session, descriptors: list[int]) -> messages.Published:
        if session.claim is None or session.context is None:
            raise ProtocolError("protocol", "publishing takes a claim, and this connection holds none")
        generation = await self.residency.publish(session.claim, descriptors, session.context)
        self._drop_claim(session)
        await self._open_lease(session, generation)
        return messages.Published(generation=generation.name)

    async def _load(self, session: Session, request: messages.Load) -> None:
        uid = session.channel.peer.uid
        if uid not in (os.geteuid(), 0):
            raise CacheMiss(
                "peer_refused",
                f"uid {uid} may use this weight cache, but not run commands as uid {os.geteuid()}",
                remedy="Let the engine load the weights and publish them",
            )
        worker = LoadWorker(request.argv, request.env, self.path, self.residency.journal.path)
        await session.channel.send(await worker.run(request.wait_s, session.channel.send, self._claim_of))

    def _claim_of(self, pid: int) -> Claim | None:
        return next((claim for claim in self.registry.claims if claim.pid == pid), None)

    async def _release(self, request: messages.Release) -> list[str]:
        names = [request.generation] if request.generation else list(self.registry.generations)
        for name in names:
            generation = self.registry.generations.get(name)
            if generation is None:
                raise CacheMiss("absent", f"no generation {name} is resident", found=list(self.registry.generations))
            if generation.leases and not request.force:
                raise ResourceError(
                    f"generation {name} is in use",
                    detail="capacity",
                    expected="no leases",
                    found=", ".join(holders(generation)),
                    remedy="Stop its engines first; with --force memory returns only when they end",
                )
        await self._until_kept([self.residency.release(name, "released") for name in names])
        return names

    def explain(self, fields: dict[str, Any], device: str | None = None) -> dict[str, Any]:
        """Whether this identity would hit now, on this GPU; if not, why, with both sides of every differing field."""
        try:
            generation = self.registry.find(fields, device)
        except CacheMiss as miss:
            return {"would_hit": False, **miss.to_dict(), "differences": miss.data.get("differences", [])}
        return {"would_hit": True, "generation": generation.name, "differences": []}

    def describe(self) -> dict[str, Any]:
        """What `readmit cache status` shows."""
        journal = self.residency.journal
        return {
            "pid": os.getpid(),
            "version": VERSION,
            "instance": self.residency.instance,
            "socket": str(self.path),
            "uptime_s": round(time.monotonic() - self._started, 3),
            "rss_mib": round(resident_bytes() / 2**20, 1),
            "capacity": self.registry.capacity,
            "resident_bytes": self.registry.resident_bytes,
            "descriptors": len(os.listdir("/proc/self/fd")),
            "descriptor_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "keeper": self.residency.deposit.active,
            "connections": len(self._sessions),
            "refused": dict(self.registry.refused),
            "generations": [generation.describe() for generation in self.registry.generations.values()],
            "claims": [claim.describe() for claim in self.registry.claims],
            "losses": [
                {"generation": loss.generation, "device": loss.device, "detail": loss.detail}
                for loss in self.registry.losses
            ],
            "journal": {"spool_bytes": journal.spool_bytes(), "lost": journal.lost},
        }


def _failure(error: Exception, request: messages.Request) -> CacheMiss:
    message = f"the daemon failed at a {type(request).__name__}: {type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return ResourceError(message, detail="memory" if error.errno == errno.ENOMEM else "descriptors")
    return CacheMiss("daemon_died", message, remedy="See the daemon's log")
