"""What to do about each reason for a miss, for those whose journal entry does not say it better."""

from typing import Final

REMEDIES: Final = {
    "no_daemon": "Start the weight cache before the engines: readmit up, or readmit cache serve",
    "refused": "Something else listens on the socket, or the daemon was going down: readmit cache status",
    "timeout": "The daemon was busy or stopped: look at its log and at the load of the machine",
    "protocol": "Daemon and engine disagree about the bytes on the socket: use one release of readmit for both",
    "protocol_version": "Restart the daemon with the release that the engines use; its weights stay with the keeper",
    "daemon_loading": "Nothing to do: the weights were being loaded, and the next recovery finds them",
    "daemon_died": "See why the daemon died: readmit logs daemon. A new one adopts the weights",
    "absent": "Load the model before it is needed: readmit cache load, or let the first engine publish it",
    "fingerprint": "See every field that differs: readmit cache explain. Load again for the new settings",
    "quant_not_allowed": "Run this model with mode off, or unquantised or as block-wise FP8",
    "residency_lost": "Nothing brings lost memory back; it happens once. After node_reboot, load before traffic",
    "device": "Let the engine publish a copy for its own GPU, or start it on the one that holds the weights",
    "ipc_unavailable": "This GPU or driver cannot share memory: use mode off, or a driver that exports allocations",
    "manifest_invalid": "The generation is quarantined and loaded again; if it recurs, report what published it",
    "import_mismatch": "Publisher and engine lay the model out differently: let the engine publish its own weights",
    "state_unrestorable": "The model keeps state that is no tensor: use mode off for it",
    "integrity": "Bytes changed in memory: test the memory or GPU, and see who wrote (readmit cache status)",
    "quarantined": "Find out why answers were wrong, then lift it: readmit cache quarantine --lift",
    "resource": "Make room: readmit cache release, a higher --capacity, or more memory or descriptors",
    "peer_refused": "Run engine and daemon as one user, or admit the engine's with --allow-uid",
}
