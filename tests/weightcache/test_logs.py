"""Log lines for people and for machines."""

import json
import logging
import os
import subprocess
import sys

from weightcache.journal import Context
from weightcache.logs import JsonFormatter, TextFormatter

EPISODE = "ab" * 16


def record(message="%s bytes", arguments=(7,), **extra):
    made = logging.LogRecord("weightcache.daemon", logging.WARNING, "file.py", 1, message, arguments, None)
    vars(made).update(extra)
    return made


def test_json_says_where_it_belongs():
    context = Context("node", "a", EPISODE, 2, 1)
    said = json.loads(JsonFormatter(context).format(record()))
    assert said.pop("time").endswith("+00:00")
    assert said == {
        "level": "warning",
        "logger": "weightcache.daemon",
        "message": "7 bytes",
        "node": "node",
        "slot": "a",
        "episode": EPISODE,
        "attempt": 2,
        "rank": 1,
        "trace_id": EPISODE,
        "span_id": context.traceparent().split("-")[2],
    }


def test_a_record_knows_better_than_its_process():
    said = json.loads(JsonFormatter(Context("node")).format(record(slot="b", episode=EPISODE)))
    assert (said["slot"], said["trace_id"]) == ("b", EPISODE)
    assert "attempt" not in said


def test_text_is_short():
    assert (
        TextFormatter()
        .format(record(slot="b", episode=EPISODE))
        .endswith("warning weightcache.daemon [b abababab]: 7 bytes")
    )


def test_an_exception_is_one_line_of_json():
    script = """
import logging, weightcache.logs
weightcache.logs.configure("json")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("x").exception("it failed")
"""
    environment = {**os.environ, "READMIT_SLOT": "a", "READMIT_EPISODE": EPISODE, "READMIT_ATTEMPT": "3"}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    (line,) = result.stderr.splitlines()
    said = json.loads(line)
    assert (said["message"], said["slot"], said["attempt"]) == ("it failed", "a", 3)
    assert "ZeroDivisionError" in said["exception"]
