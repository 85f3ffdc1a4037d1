"""Telemetry: Prometheus metrics and OpenTelemetry spans, both derived from the journal and the registry.

One process, the daemon, exports what all of them journaled; an engine's metrics would be out of reach just while it
recovers. Nothing is registered globally, and nothing is kept that the journal does not hold.
"""

from weightcache.telemetry.export import Telemetry

__all__ = ["Telemetry"]
