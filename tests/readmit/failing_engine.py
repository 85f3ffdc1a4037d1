"""A small engine that dies of its first answer where its weights are not numbers. It asks the weight cache for them.

python failing_engine.py PORT
"""

import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

from tests.weightcache.models import config, loader, skeleton

from weightcache.client import attach
from weightcache.journal import Journal
from weightcache.sdnotify import Notifier

model = skeleton()
journal = Journal.from_environment()
attach(model, config(), load=loader(model), load_bytes=1, journal=journal)


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if model.embed.weight.isnan().any():
            os.abort()
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Answers)
Notifier.from_environment().ready("serving")
server.serve_forever()
