"""``python -m readmit.reaper --after SECONDS``: releases resident weights that no engine has used for so long.

For a node whose engines come and go with their pods: once a pod is deleted, its GPU is given to somebody else, who
finds the memory taken as long as weights are held for nobody. After a restart of the reaper the time begins anew.
"""

import argparse
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from readmit.daemon import ask_daemon
from weightcache import messages, paths
from weightcache.errors import CacheMiss

log = logging.getLogger("readmit.reaper")

LOOK_S: Final = 5.0


class Reaper:
    """Looks, and releases.

    Args:
        socket: the weight cache's.
        after_s: seconds without a lease after which a generation is released.
        clock: seconds, for ever rising.
    """

    def __init__(self, socket: Path, after_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._socket = socket
        self._after_s = after_s
        self._clock = clock
        self._idle_since: dict[str, float] = {}

    def look(self) -> list[str]:
        """Release what has been idle for too long; returns the generations released.

        Raises:
            CacheMiss: the daemon does not answer.
        """
        now = self._clock()
        resident = ask_daemon(self._socket, messages.Status())["generations"]
        idle = {it["generation"] for it in resident if not it["leases"]}
        self._idle_since = {name: self._idle_since.get(name, now) for name in idle}
        released: list[str] = []
        for name, since in self._idle_since.items():
            if now - since >= self._after_s:
                # Not by force: whoever attached meanwhile keeps it.
                released += ask_daemon(self._socket, messages.Release(generation=name))["released"]
        return released


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    parser = argparse.ArgumentParser(prog="readmit.reaper", description="Release weights that no engine uses any more.")
    parser.add_argument("--after", type=float, required=True, metavar="SECONDS", help="without a lease, until then")
    parser.add_argument("--socket", type=Path, help="the weight cache's socket (default: the runtime folder's)")
    arguments = parser.parse_args()
    reaper = Reaper(arguments.socket or paths.socket_path(), arguments.after)
    while True:
        try:
            for generation in reaper.look():
                log.info("generation %s was used by nobody for %g s and is released", generation, arguments.after)
        except CacheMiss as miss:  # it is being restarted, or somebody attached between the two questions
            log.info("not now: %s", miss)
        time.sleep(LOOK_S)


if __name__ == "__main__":
    main()
