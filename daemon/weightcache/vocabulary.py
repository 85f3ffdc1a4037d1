"""The closed lists: every label value that a metric, a span or the journal may carry.

Order is meaning: phases are in the order an engine passes through them, miss reasons in the order of reporting.
Standard library only: the keeper imports this module.
"""

from typing import Final

PHASES: Final = (
    "detect",
    "backoff",
    "spawn",
    "import",
    "tokenizer_init",
    "distributed_init",
    "load_weights",
    "compile",
    "kv_profile",
    "kernel_warmup",
    "cache_alloc",
    "graph_capture",
    "server_ready",
    "semantic_verify",
)
"""The phases of an episode, the same for every engine. One an engine does not have is absent, not 0."""

UNATTRIBUTED: Final = "unattributed"
"""Time that no mark covers; shown beside the phases, never hidden."""

SUB_PHASES: Final = {
    "distributed_init": ("rendezvous", "communicator", "topology", "barrier"),
    "load_weights": (
        "skeleton",
        "connect",
        "match",
        "map",
        "verify",
        "bind",
        "buffers",
        "read",
        "process",
        "publish",
    ),
}
"""Parts of a phase, journaled as ``phase.part``."""

PATHS: Final = ("standby", "hit", "partial", "miss", "off", "unknown")
"""How a recovery got its weights."""

CAUSES: Final = (
    "first_start",
    "crash",
    "oom_kill",
    "hang",
    "wrong_answer",
    "gpu_fault",
    "node_reboot",
    "preempted",
    "upgrade",
    "config_change",
    "scale_out",
    "drill",
)
"""Why an episode began. A cause is never guessed: what nobody can prove is ``crash``."""

PLANNED_CAUSES: Final = frozenset({"first_start", "preempted", "upgrade", "config_change", "scale_out", "drill"})
"""Causes that never burn the budget for faults unless the recovery is past its deadline."""

NODE_CAUSES: Final = frozenset({"gpu_fault", "node_reboot"})
"""Causes outside the process: disaster recovery, not a fast recovery."""

OUTCOMES: Final = ("ready", "crashed", "timeout", "wrong_answer", "abandoned")
"""How an attempt or an episode ended."""

SLOT_STATES: Final = ("starting", "loading", "verifying", "ready", "suspect", "draining", "stopped")
"""The states of a slot at the gate."""

MISS_REASONS: Final = (
    "no_daemon",
    "refused",
    "timeout",
    "protocol",
    "protocol_version",
    "daemon_loading",
    "daemon_died",
    "absent",
    "fingerprint",
    "quant_not_allowed",
    "residency_lost",
    "device",
    "ipc_unavailable",
    "manifest_invalid",
    "import_mismatch",
    "state_unrestorable",
    "integrity",
    "quarantined",
    "resource",
    "peer_refused",
)
"""Why resident weights could not be used; exactly one for each failed attach."""

RESIDENCY_DETAILS: Final = ("node_reboot", "driver_fault", "gpu_lost", "keeper_lost")
"""What ended the residency, for reason ``residency_lost``."""

RESOURCE_DETAILS: Final = ("memory", "descriptors", "capacity", "name")
"""What ran out, for reason ``resource``."""

POLICIES: Final = ("fallback", "fail", "wait", "replace")
"""What a client does on a miss."""

MODES: Final = ("client", "daemon", "off")
"""How an engine uses the cache."""

QUANT_FAMILIES: Final = (
    "fp8_per_tensor",
    "compressed-tensors",
    "modelopt",
    "awq",
    "gptq",
    "marlin",
    "mxfp4",
    "nvfp4",
    "bitsandbytes",
    "gguf",
    "other",
)
"""Families of quantisation that may not travel, for the detail of ``quant_not_allowed``."""

EVENT_KINDS: Final = (
    "episode_open",
    "episode_close",
    "attempt_start",
    "attempt_end",
    "phase_begin",
    "phase_end",
    "lookup",
    "publish",
    "release",
    "lease_open",
    "lease_close",
    "slot_state",
    "probe",
    "process",
    "quarantine",
    "override",
    "clock",
)
"""The kinds of journal events; `weightcache.journal` says what each carries."""


def domain(cause: str) -> str:
    """The domain of a cause: ``node`` for what lies outside the process, otherwise ``process``."""
    return "node" if cause in NODE_CAUSES else "process"
