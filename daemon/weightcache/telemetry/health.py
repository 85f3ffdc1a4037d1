"""How telemetry itself is doing; exported like everything else."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Health:
    """Kept by `weightcache.telemetry.Telemetry`, read at scrapes."""

    degraded: bool = False
    spool_bytes: int = 0
    lost: int = 0
    salvages: int = 0
    sinks: list[str] = field(default_factory=list)
    exported: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
