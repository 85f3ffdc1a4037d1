"""What can be done about an engine that hangs or answers wrongly. The gate does none of it itself: it asks."""

import asyncio
import logging
from pathlib import Path

from weightcache.errors import CacheMiss, ConfigError
from weightcache.journal import Context
from weightcache.keeper.control import ask
from weightcache.messages import Done, Hello, Quarantine
from weightcache.protocol import Connection
from weightcache.version import VERSION

log = logging.getLogger("readmit.gate")


class Remedies:
    """Asks the keeper and the weight cache daemon.

    Args:
        runtime_dir: where the keeper's control socket is; None where no keeper is to be asked.
        cache_socket: the weight cache's socket, or None.
    """

    def __init__(self, runtime_dir: Path | None, cache_socket: Path | None) -> None:
        self._runtime_dir = runtime_dir
        self._cache_socket = cache_socket

    @property
    def can_restart(self) -> bool:
        return self._runtime_dir is not None

    @property
    def can_quarantine(self) -> bool:
        return self._cache_socket is not None

    async def restart(self, slot: str, cause: str, last_correct_ns: int | None) -> bool:
        """Have the keeper restart a slot's engine; returns whether it will."""
        assert self._runtime_dir is not None
        request: dict[str, object] = {"restart": slot, "cause": cause}
        if last_correct_ns is not None:
            request |= {"fault_ns": last_correct_ns, "fault_clock": "last_correct_answer"}
        try:
            await asyncio.to_thread(ask, self._runtime_dir, request)
        except ConfigError as error:
            log.warning("slot %s is not restarted: %s", slot, error, extra={"slot": slot})
            return False
        log.warning("slot %s is being restarted: %s", slot, cause, extra={"slot": slot})
        return True

    async def quarantine(self, generation: str, reason: str, context: Context) -> bool:
        """Have the daemon hand a generation to nobody; returns whether it will not."""
        try:
            await asyncio.to_thread(self._quarantine, generation, reason, context)
        except (CacheMiss, ConfigError) as error:
            log.warning("generation %s is not quarantined: %s", generation, error, extra=context._asdict())
            return False
        log.warning("generation %s is quarantined: %s", generation, reason, extra=context._asdict())
        return True

    def _quarantine(self, generation: str, reason: str, context: Context) -> None:
        assert self._cache_socket is not None
        hello = Hello(
            version=VERSION, node=context.node, slot=context.slot, episode=context.episode, attempt=context.attempt
        )
        connection = Connection(self._cache_socket, hello)
        try:
            connection.ask(Quarantine(generation=generation, reason=reason), Done)
        finally:
            connection.close()
