"""GPU time that recoveries cost, and that resident weights saved, against the cold starts measured here."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from weightcache.episodes import Episode
from weightcache.starting_state import COMPARED


class Mean(NamedTuple):
    """The mean of cold starts."""

    n: int
    seconds: float

    def with_(self, seconds: float) -> "Mean":
        return Mean(self.n + 1, self.seconds + (seconds - self.seconds) / (self.n + 1))


class Saving(NamedTuple):
    """What one recovery cost and saved, in GPU-seconds; ``saved`` is None where there is nothing to compare with."""

    lost: float
    saved: float | None


class GpuTime:
    """Remembers each model's cold starts by starting state, and how many GPUs each slot's engine has."""

    def __init__(self) -> None:
        self.cold: dict[str, Mean] = {}
        self.gpus: dict[str, int] = {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what the accounts of a snapshot tell."""
        self.cold |= {start: Mean(*mean) for start, mean in state["cold"].items()}
        self.gpus |= state["gpus"]

    def close(self, episode: Episode) -> Saving:
        """Account for a recovery that has ended, and learn from it if it was a cold start."""
        config = next((config for attempt in reversed(episode.attempts) if (config := attempt.config)), None)
        if config is not None:
            self.gpus[episode.slot] = gpus_of(config)
        gpus = self.gpus.get(episode.slot, 0)
        start = _start(config, episode)
        saved: float | None = 0.0
        if episode.path in ("hit", "standby") and episode.outcome == "ready":
            cold = self.cold.get(start) if start else None
            saved = None if cold is None else gpus * max(0.0, cold.seconds - episode.total_s)
        elif episode.path in ("miss", "off") and episode.outcome == "ready" and start:
            self.cold[start] = self.cold.get(start, Mean(0, 0.0)).with_(episode.total_s)
        return Saving(gpus * episode.total_s, saved)


def gpus_of(config: Mapping[str, Any]) -> int:
    """The GPUs of the engine that a rank's configuration belongs to; 0 on a CPU."""
    return 0 if config.get("device_capability") is None else int(config["tp_size"]) * int(config["pp_size"])


def _start(config: Mapping[str, Any] | None, episode: Episode) -> str | None:
    """What makes two starts comparable: model, parallelism and starting state; None where some of it is not known."""
    state = next((attempt.starting_state for attempt in episode.attempts if attempt.starting_state), None) or {}
    warmth = [state.get(name) for name in COMPARED]
    if config is None or None in warmth:
        return None
    model = config.get("checkpoint_digest") or config.get("model_path")
    sizes = [
        config.get(name) for name in ("dtype", "quant_method", "tp_size", "pp_size", "device_capability", "engine")
    ]
    return "|".join(map(str, [model, *sizes, *warmth]))
