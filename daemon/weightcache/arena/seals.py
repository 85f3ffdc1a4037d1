"""The kernel's seals: proof that a memory file will never change again. No torch: the daemon checks them too."""

import errno
import fcntl
import os
from typing import Final

from weightcache.errors import ImportRejected, ResourceError

SEALS: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def seals(descriptor: int) -> int:
    """The seals of a descriptor, 0 for one that cannot have any."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return 0


def require_sealed(descriptor: int, size: int, what: str) -> None:
    """Check that nobody can ever change a memory file again, and that it is as long as promised.

    Raises:
        ImportRejected: reason ``manifest_invalid``, with both values.
    """
    found = seals(descriptor)
    if found & SEALS != SEALS:
        raise ImportRejected(
            "manifest_invalid", f"the {what} is not sealed", expected=f"seals {SEALS:#x}", found=f"seals {found:#x}"
        )
    actual = os.fstat(descriptor).st_size
    if actual != size:
        raise ImportRejected(
            "manifest_invalid", f"the {what} has another size", expected=f"{size} bytes", found=f"{actual} bytes"
        )


def memory_file(name: str) -> int:
    """An empty memory file that can be sealed.

    Raises:
        ResourceError: no descriptor is free.
    """
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise ResourceError(
            f"no memory file can be made: {error.strerror}",
            detail="memory" if error.errno == errno.ENOMEM else "descriptors",
            remedy="Raise the limit of open files (ulimit -n, LimitNOFILE)",
        ) from error


def sealed_file(name: str, content: bytes) -> int:
    """A sealed memory file with this content, for a manifest.

    Raises:
        ResourceError: no descriptor is free.
    """
    descriptor = memory_file(name)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
