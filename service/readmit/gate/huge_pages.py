"""The gate's objects in huge pages.

Between two requests a processor forgets where thousands of small pages are, and looks each of them up again within the
next request: at 50 requests a second that was two fifths of the gate's own time (docs/gate.md). The C library asks for
huge pages where it is told to before it starts (glibc 2.35 and newer, transparent huge pages not switched off), and
Python's own allocator does not use it unless told.
"""

import os
import sys
from typing import Final

ENVIRONMENT: Final = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "PYTHONMALLOC": "malloc"}
"""For whoever starts a gate."""


def settle() -> None:
    """Start this program anew, in the same process, if whoever started it did not say how it allocates memory."""
    if not ENVIRONMENT.keys() & os.environ.keys():
        os.environ.update(ENVIRONMENT)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
