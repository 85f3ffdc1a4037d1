"""The registry: which generations are resident, who uses them, who is loading, and what was lost.

It decides and remembers; it moves no bytes and talks to nobody. All of it can be rebuilt: generations from the
descriptors that the keeper stores, losses from the journal.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from weightcache.errors import CacheMiss, ResourceError
from weightcache.fingerprint import FIELDS, CacheConfig, Difference, normalize_path
from weightcache.frames import close_all
from weightcache.manifest import Head, Manifest

_RANKS: Final = ("tp_rank", "pp_rank", "ep_rank")
"""Another rank's weights are no near match: nobody expects rank 1 to map rank 0's."""


@dataclass
class Lease:
    """One attached client; it ends with its connection."""

    name: str
    pid: int
    slot: str | None
    since_wall_ns: int


@dataclass
class Generation:
    """One published arena and its manifest, never changed afterwards.

    ``descriptors`` holds the manifest, then the arena's chunks in order; they are the daemon's own. ``stored`` is True
    once a keeper holds duplicates, so that the daemon's death does not end the weights.
    """

    name: str
    config: CacheConfig
    bytes: int
    tensors: int
    arena: str
    device: str | None
    publisher: dict[str, Any]
    descriptors: list[int]
    stored: bool = False
    quarantined: str | None = None
    hits: int = 0
    leases: dict[str, Lease] = field(default_factory=dict)
    last_used_ns: int = field(default_factory=time.monotonic_ns)

    @classmethod
    def of(cls, name: str, manifest: Manifest | Head, descriptors: list[int]) -> "Generation":
        """The generation that a validated manifest describes; takes the descriptors over."""
        return cls(
            name=name,
            config=manifest.config,
            bytes=manifest.size,
            tensors=len(manifest),
            arena=manifest.arena,
            device=manifest.device,
            publisher=msgspec.to_builtins(manifest.publisher),
            descriptors=descriptors,
        )

    def close(self) -> None:
        """Let go of the bytes; they live on while an engine has them mapped."""
        close_all(self.descriptors)
        self.descriptors.clear()

    def describe(self) -> dict[str, Any]:
        """What `status` shows."""
        return {
            "generation": self.name,
            "config": self.config.to_dict(),
            "bytes": self.bytes,
            "tensors": self.tensors,
            "arena": self.arena,
            "device": self.device,
            "publisher": self.publisher,
            "stored": self.stored,
            "quarantined": self.quarantined,
            "hits": self.hits,
            "leases": [vars(lease) for lease in self.leases.values()],
        }


@dataclass
class Claim:
    """The right to load and publish one identity, on one GPU where it is for a GPU."""

    config: CacheConfig
    pid: int
    device: str | None = None
    since: float = field(default_factory=time.monotonic)
    done: int = 0
    total: int = 0

    def describe(self) -> dict[str, Any]:
        return {
            "config": self.config.to_dict(),
            "pid": self.pid,
            "device": self.device,
            "done": self.done,
            "total": self.total,
            "elapsed_s": round(time.monotonic() - self.since, 3),
        }


@dataclass(frozen=True)
class Loss:
    """Weights that were resident and are gone without having been released."""

    generation: str
    config: CacheConfig
    detail: str
    device: str | None = None


class Registry:
    """Generations, claims and losses of one daemon.

    Replicas of a model on the GPUs of one node have one identity, and a generation each: whoever says which GPU it is
    for is told about that GPU, whoever does not about any.

    Args:
        capacity: bytes that resident generations may take together, None for no limit of ours.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.generations: dict[str, Generation] = {}
        self.claims: list[Claim] = []
        self.losses: list[Loss] = []
        self.refused: Counter[str] = Counter()
        """Connections ended for what their clients are or did, by reason of the closed list."""

    @property
    def resident_bytes(self) -> int:
        return sum(generation.bytes for generation in self.generations.values())

    @property
    def leases(self) -> int:
        return sum(len(generation.leases) for generation in self.generations.values())

    def find(self, fields: Mapping[str, Any], device: str | None = None) -> Generation:
        """The generation whose every field equals these, on this GPU.

        Raises:
            CacheMiss: ``daemon_loading``, ``quarantined``, ``residency_lost``, ``device``, ``fingerprint`` with every
                difference to the nearest generation, or ``absent``.
        """
        wanted = parse_config(fields)
        near: list[tuple[bool, int, Generation, list[Difference]]] = []
        quarantined: Generation | None = None
        elsewhere: list[Generation] = []
        for generation in self.generations.values():
            differences = wanted.differences(generation.config)
            other = another(device, generation.device)
            if differences:
                if _same_model(wanted, generation.config):
                    near.append((other, len(differences), generation, differences))
            elif other:
                elsewhere.append(generation)
            elif not generation.quarantined:
                return generation
            else:
                quarantined = generation
        for claim in self.claims:
            if not wanted.differences(claim.config) and not another(device, claim.device):
                raise CacheMiss(
                    "daemon_loading",
                    f"pid {claim.pid} is loading these weights",
                    remedy="Wait for it, or see readmit cache status",
                    **claim.describe(),
                )
        if quarantined is not None:
            raise _quarantined(quarantined)
        for loss in self.losses:
            if not wanted.differences(loss.config) and not another(device, loss.device):
                raise CacheMiss(
                    "residency_lost",
                    f"these weights were resident as generation {loss.generation} and are lost",
                    detail=loss.detail,
                    remedy="Load them again; this miss happens once",
                )
        if elsewhere and all(other for other, *_ in near):  # an older version on this GPU is what has to be replaced
            raise CacheMiss(
                "device",
                "the weights are on another GPU",
                expected=device,
                found=", ".join(sorted({str(generation.device) for generation in elsewhere})),
                remedy="An engine that loads them here publishes a copy for this GPU; or run it on that one",
            )
        if near:
            *_, generation, differences = min(near, key=lambda item: item[:2])
            raise _differs(generation, differences)
        raise CacheMiss(
            "absent",
            "no weights of this model are resident",
            expected=wanted.model_path,
            found=sorted({generation.config.model_path for generation in self.generations.values()}) or "nothing",
            remedy="Load it with readmit cache load, or let the engine load and publish it",
        )

    def claim(self, fields: Mapping[str, Any], pid: int, device: str | None = None) -> Claim:
        """Give the right to load an identity, for this GPU.

        Raises:
            CacheMiss: ``daemon_loading`` while another connection holds it, or once it has published: ask for them.
        """
        config = parse_config(fields)
        for held in self.claims:
            same = not config.differences(held.config) or held.config.key() == config.key()
            if same and not another(device, held.device):
                raise CacheMiss("daemon_loading", f"pid {held.pid} is loading these weights", **held.describe())
        for generation in self.generations.values():
            usable = not generation.quarantined and not another(device, generation.device)
            if usable and not config.differences(generation.config):
                raise CacheMiss("daemon_loading", f"these weights are resident by now, as {generation.name}")
        claim = Claim(config, pid, device)
        self.claims.append(claim)
        return claim

    def stale(self, claim: Claim) -> list[Generation]:
        """Unleased generations that a claim replaces: of the same model, rank and GPU, but other or quarantined."""
        return [
            generation
            for generation in self.generations.values()
            if not generation.leases
            and _same_model(claim.config, generation.config)
            and not another(claim.device, generation.device)
            and (generation.quarantined or claim.config.differences(generation.config))
        ]

    def make_room(self, needed: int) -> list[Generation]:
        """The unleased generations to evict so that ``needed`` bytes fit: quarantined ones, then those longest unused.

        Raises:
            ResourceError: detail ``capacity``: even without them it does not fit; nothing is evicted.
        """
        if self.capacity is None:
            return []
        excess = self.resident_bytes + needed - self.capacity
        evicted = []
        for generation in sorted(self.generations.values(), key=lambda each: (not each.quarantined, each.last_used_ns)):
            if excess <= 0:
                break
            if not generation.leases:
                evicted.append(generation)
                excess -= generation.bytes
        if excess > 0:
            raise ResourceError(
                "the weights do not fit the cache's capacity, so they stay private to their engine",
                detail="capacity",
                expected=f"{needed} bytes free of {self.capacity}",
                found=f"{self.capacity - self.resident_bytes} bytes, {self.leases} leases in use",
                remedy="Raise --capacity or release what is not needed",
                needed=needed,
                available=self.capacity - self.resident_bytes,
            )
        return evicted

    def add(self, generation: Generation) -> None:
        self.generations[generation.name] = generation
        self._forget_loss(generation.config, generation.device)

    def remove(self, name: str) -> Generation:
        """Forget a generation and hand it to the caller, who closes it."""
        return self.generations.pop(name)

    def lose(self, loss: Loss) -> None:
        """Remember that weights are gone which nobody gave up, unless the same are resident."""
        for there in self.generations.values():
            if not loss.config.differences(there.config) and not another(loss.device, there.device):
                return
        self._forget_loss(loss.config, loss.device)
        self.losses.append(loss)

    def _forget_loss(self, config: CacheConfig, device: str | None) -> None:
        self.losses = [loss for loss in self.losses if loss.config.differences(config) or another(device, loss.device)]


def parse_config(fields: Mapping[str, Any]) -> CacheConfig:
    """The identity that a client's fields describe.

    Raises:
        CacheMiss: reason ``fingerprint``: a field is unknown here, missing or of the wrong type.
    """
    unknown = sorted(set(fields) - set(FIELDS))
    if unknown:
        difference = Difference(unknown[0], str(fields[unknown[0]]), None)
        raise CacheMiss(
            "fingerprint",
            f"the field {unknown[0]!r} is unknown to this daemon, so nothing it holds can be proven equal",
            detail="unknown_field",
            differences=[msgspec.to_builtins(difference)],
            remedy="Run the same readmit release in the daemon's and the engine's environment",
        )
    missing = [name for name in FIELDS if name not in fields]
    if missing:
        raise CacheMiss(
            "fingerprint",
            f"the field {missing[0]!r} is missing, so nothing resident can be proven equal",
            detail=missing[0],
            expected=", ".join(FIELDS),
            found=", ".join(fields),
            remedy="Run the same readmit release in the daemon's and the engine's environment",
        )
    try:
        return CacheConfig.from_dict(dict(fields))
    except msgspec.ValidationError as error:
        raise CacheMiss("fingerprint", f"the fields do not make an identity: {error}") from error


def another(wanted: str | None, there: str | None) -> bool:
    """Whether these are two GPUs; who names none means any."""
    return wanted is not None and there is not None and wanted != there


def _same_model(wanted: CacheConfig, there: CacheConfig) -> bool:
    """Whether two identities are of one model and one rank, so that a difference between them explains a miss."""
    if any(getattr(wanted, name) != getattr(there, name) for name in _RANKS):
        return False
    if wanted.checkpoint_digest is not None and wanted.checkpoint_digest == there.checkpoint_digest:
        return True
    return normalize_path(wanted.model_path) == normalize_path(there.model_path)


def _differs(generation: Generation, differences: list[Difference]) -> CacheMiss:
    first = differences[0]
    others = f" ({len(differences) - 1} more differ)" if len(differences) > 1 else ""
    remedy = None
    if first.field == "checkpoint_digest" and first.expected is None:
        remedy = "Prove the files' content once with: readmit cache fingerprint MODEL --hash"
    elif first.field == "kernel_backend" and str(first.found).startswith("config-"):
        remedy = "config.json is not what it was when these were loaded; an engine that loads anew replaces them"
    return CacheMiss(
        "fingerprint",
        f"the resident generation {generation.name} differs in {first.field}{others}",
        detail=first.field,
        expected=first.expected,
        found=first.found,
        remedy=remedy or "See every difference with: readmit cache explain MODEL",
        differences=msgspec.to_builtins(differences),
        generation=generation.name,
    )


def _quarantined(generation: Generation) -> CacheMiss:
    return CacheMiss(
        "quarantined",
        f"generation {generation.name} is quarantined: {generation.quarantined}",
        remedy="Load again from disk; lift it with readmit cache quarantine --lift once it is proven right",
        generation=generation.name,
    )


def holders(generation: Generation) -> Iterator[str]:
    """The lease holders in words, for an error that names them."""
    for lease in generation.leases.values():
        yield f"pid {lease.pid}" + (f" (slot {lease.slot})" if lease.slot else "")
