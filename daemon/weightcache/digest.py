"""The digest: content identity of a checkpoint.

blake3 over the tensors by name: name, safetensors dtype, shape and blake3 of the bytes. How tensors are spread over
files takes no part, so that a checkpoint sharded anew stays the same. The library is imported on first use.
"""

import ctypes
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import torch
    from blake3 import blake3

_HEADING: Final = b"weightcache checkpoint digest 1\n"


class TensorDigest(NamedTuple):
    """What the digest knows of one tensor: name, safetensors dtype, shape, and blake3 of its bytes (32 bytes)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: bytes


def checkpoint_digest(tensors: Iterable[TensorDigest]) -> str:
    """The content identity of a checkpoint with these tensors, in any order: 64 hex digits."""
    whole = new_hash()
    whole.update(_HEADING)
    for tensor in sorted(tensors):
        line = json.dumps([tensor.name, tensor.dtype, list(tensor.shape), tensor.digest.hex()], separators=(",", ":"))
        whole.update(line.encode() + b"\n")
    return whole.hexdigest()


def tensor_digest(tensor: "torch.Tensor") -> bytes:
    """blake3 of the elements of a CPU tensor, in logical order: 32 bytes."""
    hashed = new_hash()
    contiguous = tensor.detach().contiguous()
    hashed.update(tensor_memory(contiguous))
    return hashed.digest()


def tensor_memory(tensor: "torch.Tensor") -> memoryview:
    """The bytes of a contiguous CPU tensor, writable, valid while the tensor lives.

    ``tensor.numpy()`` knows neither bfloat16 nor float8, and torch can be built without it.
    """
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())).cast("B")


def new_hash(threads: int | None = None) -> "blake3":
    """A hash on so many threads, by default as many as the bytes of an update are worth."""
    from blake3 import blake3

    return blake3(max_threads=blake3.AUTO if threads is None else threads)
