"""The journal: an append-only event log, written directly by every process that has something to say.

One SQLite file in WAL mode on a local file system holds the events of a node. State is replayed from it; snapshots of
state only shorten that, and tell what pruned events came to. The event that starts a thing is written before the thing
starts; a death is closed by whoever survives it.

An append waits at most `BUSY_LIMIT_S` for the database and then goes to the process's own spool file beside it, which
the daemon merges later, or waits in memory while the disk is full: telemetry never blocks a recovery.
``synchronous=NORMAL`` survives the death of any process, not the loss of power.

What each kind of event carries (``name``; ``attributes``):

================  ===================================================================================================
episode_open      cause; fault_boottime_ns (or fault_wall_ns, for a fault before this boot), fault_clock (``exit``,
                  ``last_correct_answer``, ``first_unanswered`` request, ``last_event`` of the boot before, ``start``,
                  ``command``), previous (episode id or None)
episode_close     outcome; verified (bool), generation, path (only where the lookups cannot tell: ``standby``)
attempt_start     empty; command, starting_state
attempt_end       outcome; exit_code, signal
phase_begin/_end  phase, or ``phase.part``; on an end ``error`` when the phase failed
lookup            ``hit``, ``miss`` or ``off``; config (every field asked for), mode, reason, detail, differences,
                  generation, bytes, message
publish           ``begin``, ``published``, ``failed``; config (every field), generation, bytes, publisher, reason
release           ``released``, ``evicted``, ``replaced``, ``lost``; generation, bytes
lease_open/close  empty; generation, lease, pid
slot_state        the state entered; previous, reason, pid, start_ticks, generation, probe_set (which golden answers
                  it gave)
probe             ``correct``, ``wrong``, ``late``, ``error``; seconds, expected, found
process           ``started``, ``spawned``, ``adopted``, ``readopted``, ``exited``, ``reexecuted`` (a keeper, as another
                  release), ``killed`` (by a drill), ``stopped`` (on purpose, the slot of an engine that was given up);
                  process, pid, start_ticks, exit_code, signal, release
quarantine        ``set`` or ``lifted``; generation, reason
override          ``set`` or ``lifted``; reason, ttl_s, user
clock             ``alive``: the daemon runs. The last event of a boot is its last sign of life
================  ===================================================================================================

An episode's id is 32 hexadecimal digits: it is the id of its OpenTelemetry trace as well.

Standard library only: engines and the keeper import this package.
"""

from weightcache.journal.boot import boot_id, boottime_ns
from weightcache.journal.context import Context, new_episode_id, span_id
from weightcache.journal.database import BUSY_LIMIT_S, SCHEMA_VERSION, Event
from weightcache.journal.log import Journal, Timing

__all__ = [
    "BUSY_LIMIT_S",
    "SCHEMA_VERSION",
    "Context",
    "Event",
    "Journal",
    "Timing",
    "boot_id",
    "boottime_ns",
    "new_episode_id",
    "span_id",
]
