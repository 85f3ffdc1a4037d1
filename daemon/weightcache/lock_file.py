"""A lock file: one process owns what it stands for, the file says who, and the kernel ends that with the process.

Standard library only.
"""

import fcntl
import os
from pathlib import Path


class Held(Exception):
    """Somebody else holds the lock.

    Args:
        holder: what they wrote into it, a line; empty where they have not yet.
    """

    def __init__(self, holder: str) -> None:
        self.holder = holder
        super().__init__(holder)


def hold(path: Path, holder: str) -> int:
    """Hold a lock for as long as the returned descriptor, or a duplicate of it, is open.

    Raises:
        Held: another process has it.
        OSError: there can be no such file, or its file system takes no locks.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                written = os.pwrite(descriptor, f"{holder}\n".encode(), 0)
                os.ftruncate(descriptor, written)  # not before, so that whoever reads meanwhile finds a name
                return os.dup(descriptor)
            # else its last holder removed the file between our open and our lock
        except BlockingIOError:
            raise Held(os.pread(descriptor, 1024, 0).decode(errors="replace").partition("\n")[0]) from None
        finally:
            os.close(descriptor)
