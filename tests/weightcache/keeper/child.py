"""What the keeper's tests run: reports how it was started, then does what its words say.

``child.py REPORTS NAME WORD...`` writes REPORTS/NAME-1.json, NAME-2.json, ... at each start.
"""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from weightcache.sdnotify import Notifier, listen_fds

reports, name, *words = sys.argv[1:]
notifier = Notifier.from_environment()
handed = listen_fds()
received = list(handed)
leases: list[socket.socket] = []


def content(fd: int) -> str:
    try:
        return os.pread(fd, 100, 0).decode()
    except OSError:
        return "not a file"


def report(**more: object) -> None:
    facts = {
        "pid": os.getpid(),
        "handed": [(label, content(fd)) for label, fd in received],
        "environment": dict(os.environ),
        "core": resource.getrlimit(resource.RLIMIT_CORE)[0],
        "ignored": [number.name for number in signal.Signals if signal.getsignal(number) == signal.SIG_IGN],
        "open": sorted(int(fd) for fd in os.listdir("/proc/self/fd")),
        "session": os.getsid(0),
        **more,
    }
    count = 1 + len(list(Path(reports).glob(f"{name}-*.json")))
    part = Path(reports, f".{name}-{count}")
    part.write_text(json.dumps(facts))
    part.rename(Path(reports, f"{name}-{count}.json"))


def store() -> None:
    for label, fd in handed:
        notifier.store(label, fd, poll=label.startswith("lease"))
    notifier.barrier()


def memory(text: str) -> int:
    fd = os.memfd_create(text)
    os.write(fd, text.encode())
    return fd


def hang_up(_number: int, _frame: object) -> None:
    store()
    Path(reports, f"{name}-stored-again").touch()


# "slow-start": SIGHUP comes before there is a handler for it.
if "slow-start" in words:
    report()
    while not Path(reports, f"{name}-go").exists():
        time.sleep(0.01)
if "stores" in words or "slow-start" in words or "stores-many" in words:
    signal.signal(signal.SIGHUP, hang_up)
if not handed and "stores" in words:
    listener = socket.socket(socket.AF_UNIX)
    path = Path(os.environ["READMIT_RUNTIME"], "cache.sock")
    path.unlink(missing_ok=True)
    listener.bind(str(path))
    listener.listen()
    handed += [("listen", os.dup(listener.fileno())), ("arena-1-0", memory("first")), ("arena-1-1", memory("second"))]
    handed += [("manifest-1", memory("map"))]
    store()
if not handed and "stores-many" in words:
    fds = [memory(str(place)) for place in range(300)]
    notifier.store("many", *fds)
    notifier.barrier()
if "worker" in words:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(1000)"
    worker = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
    assert worker.stdout is not None
    worker.stdout.readline()
    report(worker=worker.pid)
elif "slow-start" not in words:
    report()
if "accepts-lease" in words:
    os.makedirs(reports, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.join(reports, "lease.sock"))
        server.listen()
        connection, _ = server.accept()
        notifier.store("lease-1-1", connection.fileno(), poll=True)
        notifier.barrier()
if "impostor" in words:
    speak = "from weightcache.sdnotify import Notifier; Notifier.from_environment().ready('I am the worker')"
    subprocess.run([sys.executable, "-c", speak], check=True)
    notifier.barrier()
    Path(reports, f"{name}-spoke").touch()
if "crash" in words:
    print("loading weights", flush=True)
    print("RuntimeError: out of luck", file=sys.stderr, flush=True)
    sys.exit(3)
if "bad-settings" in words:
    print("there is no such model", flush=True)
    sys.exit(os.EX_CONFIG)
if "stubborn" in words:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "silent" not in words:
    notifier.ready("serving")
while True:
    time.sleep(1000)
