"""The reference engine, except that the first one on a journal opens its port, takes connections and says nothing."""

import os
import signal
import socket
import sys
from pathlib import Path

from readmit import engine

if __name__ == "__main__":
    first = Path(os.environ["READMIT_JOURNAL"]).with_name("first")
    if not first.exists():
        first.touch()
        with socket.create_server(("127.0.0.1", int(sys.argv[-1]))):
            signal.pause()
    engine.main()
