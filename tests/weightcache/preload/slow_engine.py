"""What the tests fork: tells who it is when it runs, then does what it is told. Copied to where it can be changed."""

import json
import os
import signal
import sys
import threading
import time
import types
from pathlib import Path

IMPORTED_BY = os.getpid()
if os.environ.get("IMPORT_STARTS") == "thread":
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
if os.environ.get("IMPORT_STARTS") == "cuda":  # told as torch tells it, where there is none to start
    sys.modules["torch"] = types.ModuleType("torch")
    sys.modules["torch"].cuda = types.SimpleNamespace(is_initialized=lambda: True)  # type: ignore[attr-defined]
if os.environ.get("IMPORT_STARTS") == "nothing" and "--socket" in sys.argv:
    import there_is_no_such_module  # type: ignore[import-not-found]  # noqa: F401

if __name__ == "__main__":
    import slow_engine  # type: ignore[import-not-found]

    from weightcache.sdnotify import Notifier

    folder, deed = Path(sys.argv[1]), sys.argv[2]
    told = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "session": os.getsid(0),
        "imported_by": slow_engine.IMPORTED_BY,
        "argv": sys.argv,
        "cwd": os.getcwd(),
        "environment": dict(os.environ),
        "tasks": len(os.listdir("/proc/self/task")),
        "blocked": [number.name for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    }
    partial = folder / f".{os.getpid()}"
    partial.write_text(json.dumps(told))
    partial.rename(folder / f"{os.getpid()}.json")
    print("engine speaks", flush=True)
    Notifier.from_environment().ready()
    if deed == "exit" and os.getpid() != slow_engine.IMPORTED_BY:
        sys.exit(7)
    time.sleep(3600)
