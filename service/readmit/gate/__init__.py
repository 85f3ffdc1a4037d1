"""The gate: lets traffic in only when the model answers correctly.

`slots` is the state machine and its lease of readiness, `watch` follows one slot's engine through its life, `verifier`
asks it the golden questions, `chronicle` is the journal as the gate sees it, `proxy` passes requests on, `problem` says
why not, `app` puts them together and `server` gives them a socket that outlives the process.
"""
