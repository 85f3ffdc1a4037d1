"""What warmth costs and spares: bytes kept resident over time, and GPUs that no hot standby has to hold for it."""

from dataclasses import dataclass, field
from typing import Any

from weightcache.episodes import Change, Replay
from weightcache.journal import Event


@dataclass
class Held:
    """A resident generation: one rank's weights."""

    bytes: int
    on_gpu: bool
    leases: set[str] = field(default_factory=set)


class Rent:
    """Byte-seconds of resident weights, leased and idle, from what the journal says of generations and leases.

    All times as in `weightcache.episodes.Replay`.
    """

    def __init__(self) -> None:
        self.held: dict[str, Held] = {}
        self.leased_byte_ns = 0
        self.idle_byte_ns = 0
        self.standby_gpu_ns = 0
        """GPU time that a hot standby of every engine would have held beside it."""
        self.since_ns = 0

    def feed(self, event: Event, replay: Replay, change: Change) -> None:
        """Take in an event after the replay did."""
        if change.lost_ns is not None:
            self.settle(change.lost_ns)
            self.held.clear()  # memory does not outlive its boot; after its last sign of life nothing is known of it
        if event.kind not in ("publish", "release", "lease_open", "lease_close", "process"):
            return
        if event.boot_id != replay.boot:
            return  # late news of a boot whose memory is gone
        at_ns = replay.clock.place(event)
        self.settle(at_ns)
        facts = event.attributes
        name = str(facts.get("generation"))
        match event.kind, event.name:
            case "publish", "published":
                config: dict[str, Any] = facts.get("config") or {}
                self.held[name] = Held(facts.get("bytes", 0), config.get("device_capability") is not None)
            case "release", _:
                self.held.pop(name, None)
            case "lease_open", _ if name in self.held:
                self.held[name].leases.add(str(facts.get("lease")))
            case "lease_close", _ if name in self.held:
                self.held[name].leases.discard(str(facts.get("lease")))
            case "process", ("started" | "readopted") if facts.get("process") == "daemon":
                self._restarted(facts)

    def settle(self, at_ns: int) -> None:
        """Count up to a time; what lies before the latest one counted is counted already."""
        leased, idle, gpus = self._sizes()
        running = max(0, at_ns - self.since_ns)
        self.leased_byte_ns += leased * running
        self.idle_byte_ns += idle * running
        self.standby_gpu_ns += gpus * running
        self.since_ns = max(self.since_ns, at_ns)

    def seconds(self, now_ns: int) -> tuple[float, float, float]:
        """Byte-seconds leased and idle, and GPU-seconds of standbys not held, up to now."""
        leased, idle, gpus = self._sizes()
        running = max(0, now_ns - self.since_ns)
        return (
            (self.leased_byte_ns + leased * running) / 1e9,
            (self.idle_byte_ns + idle * running) / 1e9,
            (self.standby_gpu_ns + gpus * running) / 1e9,
        )

    def _sizes(self) -> tuple[int, int, int]:
        leased = sum(held.bytes for held in self.held.values() if held.leases)
        gpus = sum(held.on_gpu for held in self.held.values() if held.leases)
        return leased, sum(held.bytes for held in self.held.values()) - leased, gpus

    def _restarted(self, facts: dict[str, Any]) -> None:
        """A daemon says what it has; whatever else there was went with its predecessor, as did ended leases."""
        there, leases = set(facts.get("generations") or ()), set(facts.get("lease_names") or ())
        self.held = {name: held for name, held in self.held.items() if name in there}
        for held in self.held.values():
            held.leases &= leases
