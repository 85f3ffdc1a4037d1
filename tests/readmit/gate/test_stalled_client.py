"""A client that stops reading keeps no engine for ever."""

import socket
import sys
from pathlib import Path

from tests.readmit.gate.harness import Child, ScriptedEngine, ending, probe_file, until

PROGRAM = """
import sys
from pathlib import Path
from readmit.gate.server import run
from readmit.gate.settings import GateSettings, SlotSettings
from weightcache.logs import configure
configure(None)
slots = (SlotSettings("a", sys.argv[1], supervised=False),)
run(GateSettings(slots, listen="127.0.0.1:0", probes=Path(sys.argv[2]), idle_limit_s=1.0, drain_notice_s=0.0))
"""


def test_what_nobody_takes_is_broken_off(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    gate = Child([sys.executable, "-c", PROGRAM, engine.url, str(probe_file(tmp_path / "probes.json"))])
    with ending(gate, engine):
        port = int(gate.says(r"listening on 127.0.0.1:([0-9]+)")[1])
        gate.says("ready ")
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /v1/endless HTTP/1.1\r\nHost: gate\r\n\r\n")
            client.recv(1)
            until(lambda: engine.tell()["disconnects"] == 1, "the engine to be left alone")
            assert engine.tell()["sent"] > 0
