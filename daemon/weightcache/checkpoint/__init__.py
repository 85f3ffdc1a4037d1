"""Checkpoints in safetensors files: preflight over index and headers, then one pass over the bytes.

::

    checkpoint = Checkpoint.open("/models/ling")      # raises CheckpointError before a byte of a tensor is touched
    for name, tensor in checkpoint.read(): ...
    checkpoint.digest                                 # content identity, at no second read
"""

from weightcache.checkpoint.folder import Folder
from weightcache.checkpoint.header import DTYPES, TensorInfo
from weightcache.checkpoint.part import Part
from weightcache.checkpoint.preflight import Checkpoint
from weightcache.checkpoint.refusal import REASONS
from weightcache.checkpoint.stamp import Stamp
from weightcache.checkpoint.tied import Tie

__all__ = ["DTYPES", "REASONS", "Checkpoint", "Folder", "Part", "Stamp", "TensorInfo", "Tie"]
