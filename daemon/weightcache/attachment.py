"""One attach, step by step: connect, match, map, verify, bind, buffers. Each is a part of ``load_weights``."""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from torch import nn

from weightcache import messages
from weightcache.arena import FilledArena, MappedArena, kinds
from weightcache.binding import Binding, garbage_collection_off, require_no_meta
from weightcache.errors import CacheMiss, ConfigError, ImportRejected, ProtocolError
from weightcache.fingerprint import CacheConfig
from weightcache.frames import close_all
from weightcache.journal import Journal
from weightcache.manifest import Manifest, read
from weightcache.policy import QUARANTINES
from weightcache.protocol import Connection
from weightcache.publish import Packed
from weightcache.version import VERSION

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in total."""


class Loaded(NamedTuple):
    """What a loader may tell: the checkpoint's digest, taken while reading, and the arena that it read into."""

    digest: str | None
    arena: FilledArena | None = None


Loader = Callable[[Progress], str | Loaded | None]
"""Fills the model from disk. With a digest there is no second read, with an arena there is no copy to publish."""


@dataclass
class Outcome:
    """How a model got its weights.

    Args:
        path: ``hit`` (mapped resident weights), ``miss`` (read from disk first) or ``off``.
        reason: of the miss, from the closed list, and its ``detail`` and ``message``.
        differences: every differing field of the fingerprint with both values.
        phases: seconds each part of ``load_weights`` took here.
        bytes: of the arena mapped, 0 when the weights are private.
        generation: the generation mapped (or published and mapped), None when the weights are private.
        private_because: why a miss was not published, where it was to be.
    """

    path: str
    mode: str
    reason: str | None = None
    detail: str | None = None
    message: str | None = None
    differences: list[dict[str, Any]] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    bytes: int = 0
    generation: str | None = None
    private_because: str | None = None


class Attachment:
    """The steps of one attach, each a part of ``load_weights``."""

    def __init__(
        self,
        model: nn.Module,
        config: CacheConfig,
        mode: str,
        *,
        socket: Path,
        journal: Journal,
        verify: float | None = None,
        device: int | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.socket = socket
        self.journal = journal
        self.verify = verify
        self.device = device
        self.outcome = Outcome(path="off" if mode == "off" else "miss", mode=mode)
        self.connection: Connection | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU will compute with the weights."""
        return self.config.device_capability is not None

    @functools.cached_property
    def gpu(self) -> str | None:
        """UUID of the GPU that will compute with the weights; None on the CPU."""
        if not self.on_gpu:
            return None
        from weightcache import device

        return device.uuid(self.device)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time and journal a part of ``load_weights``."""
        with self.journal.phase(f"load_weights.{name}") as timing:
            yield
        self.outcome.phases[name] = self.outcome.phases.get(name, 0.0) + timing.seconds

    def connect(self) -> Connection:
        """The connection to the daemon, made on first use."""
        if self.connection is None:
            where = self.journal.context
            hello = messages.Hello(
                version=VERSION,
                node=where.node,
                slot=where.slot,
                episode=where.episode,
                attempt=where.attempt,
                rank=where.rank,
                traceparent=where.traceparent(),
            )
            with self.part("connect"):
                self.connection = Connection(self.socket, hello)
        return self.connection

    def disconnect(self) -> None:
        """Give up lease and claim."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def map(self, wait_s: float, progress: Progress | None) -> None:
        """Map resident weights into the model.

        Raises:
            CacheMiss: they cannot be used; the model is unchanged and the lease is given back.
        """
        connection = self.connect()
        with self.part("match"):
            request = messages.Attach(config=self.config.to_dict(), wait_s=wait_s, device=self.gpu)
            replies = connection.ask_for_all(request, timeout_s=wait_s + 10.0)
            self._prepare()  # while daemon and keeper see to the lease
            generation, descriptors = _attached(replies, progress)
        try:
            with garbage_collection_off():
                self._bind(generation, descriptors)
        except BaseException as error:
            if isinstance(error, ImportRejected) and error.reason in QUARANTINES:
                self.quarantine(generation, error)
            self.disconnect()
            raise
        finally:
            close_all(descriptors)

    def adopt(self, generation: str, packed: Packed) -> None:
        """Replace the model's private weights by what was just published, so that there is one copy of them."""
        self._place(generation, packed.manifest, *self._mapped(packed.manifest, packed.descriptors[1:]))

    def _prepare(self) -> None:
        """What a GPU's first mapping needs besides the weights."""
        if self.on_gpu:
            from weightcache.arena.cuda_vmm import prepare

            with self.journal.phase("load_weights.map"):  # half a second where the engine has no CUDA context yet
                prepare(self.device)

    def _bind(self, generation: str, descriptors: list[int]) -> None:
        if not descriptors:
            raise ProtocolError("protocol", "the daemon offered weights without descriptors")
        with self.part("match"):
            _, manifest = read(descriptors[0], generation)
            differences = self.config.differences(manifest.config)
        if differences:
            raise ImportRejected(
                "import_mismatch",
                f"the daemon offered weights of another identity: {differences[0]}",
                differences=msgspec.to_builtins(differences),
            )
        mapped, verification = self._mapped(manifest, descriptors[1:])
        close_all(descriptors)  # now, while a GPU verifies: closing dozens takes a while
        descriptors.clear()
        self._place(generation, manifest, mapped, verification)

    def _mapped(self, manifest: Manifest, chunks: list[int]) -> "tuple[MappedArena, Verification | None]":
        share = kinds.verified_share(manifest) if self.verify is None else self.verify
        with self.part("map"):
            rows = rows_to_verify(manifest, share)
            mapped = _map(manifest, chunks, self.device, rows)
            return mapped, Verification(manifest, mapped, rows) if rows else None

    def _place(
        self, generation: str, manifest: Manifest, mapped: MappedArena, verification: "Verification | None"
    ) -> None:
        with self.part("bind"):
            binding = Binding(self.model, manifest, mapped.views(manifest))
        with self.part("buffers"):
            binding.copy_buffers()
        if verification is not None:  # a GPU has been at it all the while
            with self.part("verify"):
                verification.finish()  # the last step that can fail; nothing is placed yet
        with self.part("bind"):
            binding.place_parameters()
            binding.place_buffers()
        # The lease must live exactly as long as the tensors can be used: it hangs on the model.
        self.model.__dict__["_weightcache_lease"] = self.connection
        self.outcome.generation = generation
        self.outcome.bytes = manifest.size

    def quarantine(self, generation: str, rejected: ImportRejected) -> None:
        """Keep others from what was refused here."""
        if self.connection is not None:
            with contextlib.suppress(CacheMiss):  # the daemon is gone or busy; the refusal itself is what counts
                request = messages.Quarantine(generation=generation, reason=str(rejected))
                self.connection.ask(request, messages.Done)

    def load_privately(self, load: Loader | None) -> Outcome:
        """Read from disk with the cache off."""
        if load is None:
            raise ConfigError("mode", "mode off reads from disk, and there is nothing given to read with")
        self.journal.append("lookup", "off", {"mode": "off", "config": self.config.to_dict()})
        with self.part("read"):
            load(ignore_progress)
        require_no_meta(self.model)
        return self.outcome


def rows_to_verify(manifest: Manifest, share: float) -> Sequence[int]:
    """A share of the tensors, drawn anew each time; 1 is every one."""
    rows = range(len(manifest))
    if share >= 1 or not rows:
        return rows
    return sorted(random.sample(rows, min(len(rows), max(1, round(share * len(rows)))))) if share > 0 else ()


class Verification:
    """A check of mapped bytes against the digests taken at publish, under way from the start on a GPU.

    Args:
        manifest: validated.
        mapped: its arena.
        rows: to check; every one if None.
    """

    def __init__(self, manifest: Manifest, mapped: MappedArena, rows: Sequence[int] | None = None) -> None:
        self._manifest = manifest
        self._rows = range(len(manifest)) if rows is None else rows
        self._digests = mapped.digests(manifest, self._rows)

    def finish(self) -> None:
        """Wait for it.

        Raises:
            ImportRejected: reason ``integrity``, naming the tensors that differ.
        """
        manifest, found, size = self._manifest, self._digests(), self._manifest.digest_size
        if found == manifest.digests:
            return
        differing = [
            manifest.names[row]
            for number, row in enumerate(self._rows)
            if found[number * size : (number + 1) * size] != manifest.digest(row)
        ]
        if differing:
            raise ImportRejected(
                "integrity",
                f"{len(differing)} of {len(manifest)} resident tensors are not what was published: {differing[0]}",
                expected=f"{manifest.digest_algorithm} as published",
                found="other bytes",
                remedy="The generation is quarantined; load again from disk",
                tensors=differing,
            )


def _attached(replies: Iterator[tuple[messages.Reply, list[int]]], progress: Progress | None) -> tuple[str, list[int]]:
    for reply, descriptors in replies:
        if isinstance(reply, messages.Attached):
            return reply.generation, descriptors
        if not isinstance(reply, messages.Loading):
            break
        if progress:
            progress(reply.done, reply.total)
    raise ProtocolError("protocol", "the daemon answered something else", expected="Attached or Loading")


def _map(manifest: Manifest, chunks: list[int], device: int | None, rows: Sequence[int]) -> MappedArena:
    if len(chunks) != len(manifest.chunks):
        raise ImportRejected(
            "manifest_invalid",
            "the arena came with another number of chunks than its manifest says",
            expected=len(manifest.chunks),
            found=len(chunks),
        )
    return kinds.mapping(manifest, chunks, device, rows or None)


def ignore_progress(done: int, total: int) -> None:
    """Progress that nobody waits for."""
