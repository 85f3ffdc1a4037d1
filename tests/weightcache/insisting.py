"""Attach in mode ``daemon``, and say what came of it: ``python -m tests.weightcache.insisting MODEL SOCKET``."""

import sys
from pathlib import Path

from weightcache.integrations.transformers import from_pretrained

if __name__ == "__main__":
    _, outcome = from_pretrained(sys.argv[1], mode="daemon", socket=Path(sys.argv[2]))
    print(outcome.reason, outcome.bytes > 0, outcome.private_because)
