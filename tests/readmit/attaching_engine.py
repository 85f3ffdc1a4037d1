"""A small engine whose weights come through the weight cache. It knows one answer.

python -m tests.readmit.attaching_engine PORT MODE [CHECKPOINT]

Its weights are made up; with a checkpoint's folder they go by that one's identity. With port 0 it loads and publishes,
and that is all.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

from tests.weightcache.models import config, loader, skeleton

from weightcache.checkpoint import Folder
from weightcache.client import attach
from weightcache.identity import digest_of
from weightcache.journal import Journal


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/grow":  # beyond any limit that it was given, which the kernel answers
            self.server.hoard = [bytearray(b"x") * (64 << 20) for _ in range(32)]  # type: ignore[attr-defined]
        self.answer({"data": [{"id": "scripted"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({"choices": [{"text": " Paris", "logprobs": None}]})

    def answer(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    port, mode, *folders = sys.argv[1:]
    identity = config()
    for folder in map(Folder.open, folders):
        identity = config(model_path=folder.path, checkpoint_digest=digest_of(folder).digest)
    model = skeleton()
    journal = Journal.from_environment()
    with journal.phase("load_weights"):
        attach(model, identity, mode=mode, load=loader(model), load_bytes=1, journal=journal)
    if port == "0":
        return
    with journal.phase("server_ready"):
        server = HTTPServer(("127.0.0.1", int(port)), Answers)
    server.serve_forever()


if __name__ == "__main__":
    main()
