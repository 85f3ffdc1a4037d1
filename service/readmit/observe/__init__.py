"""Observe mode: what an engine that nobody changed says of its start, put into the journal.

`markers` reads lines by a table, `vllm` and `sglang` are the tables, `engines` picks the table for a command, and
`observer` follows the output that the keeper keeps of each attempt. What no line says is not known: a path without a
line is `unknown`, never `hit`.
"""
