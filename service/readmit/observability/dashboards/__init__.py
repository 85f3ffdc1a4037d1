"""The five dashboards. Recoveries by hit and by miss stand side by side and are never averaged together."""

from readmit.observability.dashboards import cache, fleet, gate, overview, recovery
from readmit.observability.panels import Dashboard


def dashboards() -> list[Dashboard]:
    """All of them."""
    return [module.dashboard() for module in (overview, recovery, cache, gate, fleet)]
