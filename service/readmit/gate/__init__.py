"""The gate: lets traffic in only when the model answers correctly.

`slots` is the state machine and its lease of readiness. `watch` finds a slot's engine process, `life` asks it until it
answers correctly and as long as it serves, `verifier` puts the golden questions, `chronicle` is the journal as the gate
sees it. `proxy` passes requests on, `problem` says why not, `app` puts all together, and `server` gives it a socket
that outlives the process.
"""
