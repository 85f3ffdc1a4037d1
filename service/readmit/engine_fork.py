"""What every start of the reference engine imports, for `weightcache.preload` to hold ready.

In a node's file: ``preload = "readmit.engine"``, and a command that runs ``python -m readmit.engine``.
"""

import importlib
import os
from typing import Final

MODULES: Final = (
    "readmit.completions",
    "readmit.generation",
    "readmit.server",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",  # for what nearly every architecture imports as well
    "uvicorn.lifespan.on",
    "uvicorn.loops.asyncio",
    "uvicorn.protocols.http.h11_impl",
    "weightcache.client",
    "weightcache.integrations.transformers",
)
"""Imported by `readmit.engine` only when it is run."""


def preload() -> None:
    """Import them, as `readmit.engine.main` would."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported
    for module in MODULES:
        importlib.import_module(module)
