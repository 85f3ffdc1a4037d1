"""The reference engine, except that it does not survive resident weights: a fault that the weights carry."""

import os
import sys
from typing import Any

from readmit import engine
from weightcache.integrations import transformers

load = transformers.from_pretrained


def from_pretrained(*arguments: Any, **options: Any) -> Any:
    model, outcome = load(*arguments, **options)
    if outcome.path == "hit":
        print("died on resident weights", file=sys.stderr, flush=True)
        os._exit(70)
    return model, outcome


if __name__ == "__main__":
    transformers.from_pretrained = from_pretrained
    engine.main()
