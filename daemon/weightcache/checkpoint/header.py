"""The header of one safetensors file, checked against the file's size.

Format: 8 bytes of header length (little endian), the header as JSON, the data. A header maps tensor names to dtype,
shape and a byte range within the data; ``__metadata__`` maps text to text. The rules are those of the library
(https://github.com/huggingface/safetensors, ``Metadata::validate``): ranges in order cover the data with no hole and no
overlap.
"""

import math
import os
from typing import Any, Final, NamedTuple

from weightcache.checkpoint.document import parse_object
from weightcache.checkpoint.refusal import reading, refusal
from weightcache.errors import CheckpointError

MAX_HEADER_BYTES: Final = 100_000_000
"""The limit that the safetensors library sets."""

MAX_DIMENSIONS: Final = 64
"""The limit of torch's iterators; it also bounds the work that a hostile shape can cause."""


class Dtype(NamedTuple):
    """A safetensors dtype: bits an element, and the name of the torch dtype that holds the same bits."""

    bits: int
    torch: str


DTYPES: Final = {
    "BOOL": Dtype(8, "bool"),
    "U8": Dtype(8, "uint8"),
    "I8": Dtype(8, "int8"),
    "U16": Dtype(16, "uint16"),
    "I16": Dtype(16, "int16"),
    "U32": Dtype(32, "uint32"),
    "I32": Dtype(32, "int32"),
    "U64": Dtype(64, "uint64"),
    "I64": Dtype(64, "int64"),
    "F16": Dtype(16, "float16"),
    "BF16": Dtype(16, "bfloat16"),
    "F32": Dtype(32, "float32"),
    "F64": Dtype(64, "float64"),
    "C64": Dtype(64, "complex64"),
    "F8_E4M3": Dtype(8, "float8_e4m3fn"),
    "F8_E5M2": Dtype(8, "float8_e5m2"),
    "F8_E8M0": Dtype(8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": Dtype(8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": Dtype(8, "float8_e5m2fnuz"),
    "F4": Dtype(4, "float4_e2m1fn_x2"),
}
"""What `safetensors.torch.load_file` accepts, for every path alike. ``F6_E2M3`` and ``F6_E3M2`` are in the format, but
no torch type holds them. ``F4`` states the logical shape; the torch type packs two values, so its last dimension is
half as long."""

_INTEGER: Final = {int}  # and not bool, which is one of Python's integers

_MAGIC: Final = {
    b"PK\x03\x04": "a zip archive (a PyTorch pickle?)",
    **dict.fromkeys((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), "a pickle"),
    b"version ": "a Git LFS pointer: the weights themselves were not downloaded",
    b"GGUF": "a GGUF file",
    b"\x93NUMPY": "a NumPy array",
    b"\x89HDF": "an HDF5 file",
    b"\x1f\x8b": "a gzip archive",
    b"<": "a page in HTML or XML, such as a server's answer to a download that failed",
    b"{": "JSON, such as a server's answer to a download that failed",
}
"""Beginnings of what is often found in place of weights; looked at once the length is known to be wrong."""


class TensorInfo(NamedTuple):
    """One tensor of a checkpoint.

    Attributes:
        file: the name of its file within the folder.
        dtype: its safetensors dtype, a key of `DTYPES`.
        shape: its logical shape; for ``F4`` in values, of which a byte holds two.
        begin: its first byte in the file, header included.
        end: the byte after its last.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def read_header(descriptor: int, name: str, path: str, size: int) -> dict[str, TensorInfo]:
    """The tensors of an open safetensors file, by rising position.

    Args:
        descriptor: the file, open for reading; its position stays.
        name: the file's name within its folder.
        path: the same for people.
        size: the file's size in bytes.

    Raises:
        CheckpointError: ``truncated``, ``geometry``, ``not_safetensors``, ``dtype``, ``duplicate_tensor`` or
            ``unreadable``.
    """
    with reading(path):
        head = os.pread(descriptor, 8, 0)
        length = int.from_bytes(head, "little")
        if len(head) == 8 and length <= min(MAX_HEADER_BYTES, size - 8):
            raw = os.pread(descriptor, length, 8)
        else:
            raise _bad_length(head, length, path, size)
    if not raw.startswith(b"{"):
        raise refusal(
            "not_safetensors",
            f"{path} has no safetensors header",
            expected="'{' after the length",
            found=raw[:8],
            remedy="Download the file again",
            file=path,
        )
    data = 8 + length
    entries = parse_object(raw, path, "not_safetensors", tensors=dict)
    _check_metadata(entries.pop("__metadata__", None), path)
    tensors = {tensor: _tensor(tensor, entry, name, path, data) for tensor, entry in entries.items()}
    return _cover(tensors, path, data, size)


def _bad_length(head: bytes, length: int, path: str, size: int) -> CheckpointError:
    facts: dict[str, Any] = {"remedy": "Download the file again", "file": path}
    for magic, what in _MAGIC.items():
        if head.startswith(magic):
            return refusal("not_safetensors", f"{path} has another format", expected="safetensors", found=what, **facts)
    if len(head) == 8 and length > MAX_HEADER_BYTES:
        return refusal(
            "not_safetensors",
            f"{path}, a file of {size} bytes, promises a header longer than the format allows",
            expected=f"at most {MAX_HEADER_BYTES} bytes",
            found=f"{length} bytes",
            **facts,
        )
    return refusal(
        "truncated",
        f"{path} ends within its header",
        expected=f"at least {8 + length if len(head) == 8 else 8} bytes",
        found=f"{size} bytes",
        **facts,
    )


def _check_metadata(metadata: object, path: str) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise refusal(
            "not_safetensors",
            f"the header of {path} has bad metadata",
            expected="an object of text under __metadata__",
            found=type(metadata).__name__ if not isinstance(metadata, dict) else "values that are not text",
            remedy="Write the file again with the safetensors library",
            file=path,
        )


def _tensor(tensor: str, entry: Any, name: str, path: str, data: int) -> TensorInfo:
    facts: dict[str, Any] = {"file": path, "tensor": tensor}
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = (*shape, begin, end)
        whole = type(shape) is list and set(map(type, numbers)) == _INTEGER and min(numbers) >= 0
        tensor.encode()
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise refusal(
            "not_safetensors",
            f"the header of {path} has a bad entry for tensor {tensor!a}",
            expected="dtype, shape and data_offsets, in whole numbers from 0",
            found=_shortened(entry),
            remedy="Write the file again with the safetensors library",
            **facts,
        )
    kind = DTYPES.get(dtype) if type(dtype) is str else None
    if kind is None:
        raise refusal(
            "dtype",
            f"tensor {tensor} in {path} has an unsupported dtype",
            expected=f"one of {', '.join(DTYPES)}",
            found=repr(dtype),
            remedy="Convert the tensor, or load this model with the engine that wrote it",
            **facts,
        )
    if len(shape) > MAX_DIMENSIONS:
        raise refusal(
            "geometry",
            f"tensor {tensor} in {path} has too many dimensions",
            expected=f"at most {MAX_DIMENSIONS}",
            found=len(shape),
            **facts,
        )
    bits = math.prod(shape) * kind.bits
    if bits != 8 * (end - begin) or (kind.bits < 8 and (not shape or shape[-1] % 2)):
        raise refusal(
            "geometry",
            f"tensor {tensor} in {path} does not fit its byte range",
            expected=f"{bits} bits, in whole bytes, for {dtype} {shape}" if bits < 2**63 else f"a shape below {shape}",
            found=f"{end - begin} bytes ({begin} to {end})",
            remedy="Download the file again",
            **facts,
        )
    return TensorInfo(name, dtype, tuple(shape), data + begin, data + end)


def _cover(tensors: dict[str, TensorInfo], path: str, data: int, size: int) -> dict[str, TensorInfo]:
    """The tensors by position, once their ranges are known to cover the file exactly."""
    ordered = sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end))
    end, before = data, "the header"
    for tensor, info in ordered:
        if info.begin != end:
            raise refusal(
                "geometry",
                f"{path} has {'a hole' if info.begin > end else 'an overlap'} between {before} and tensor {tensor}",
                expected=f"tensor {tensor} at byte {end}",
                found=f"byte {info.begin}",
                remedy="Download the file again",
                file=path,
                tensor=tensor,
            )
        end, before = info.end, f"tensor {tensor}"
    if size != end:
        raise refusal(
            "truncated" if size < end else "geometry",
            f"{path} is {'shorter' if size < end else 'longer'} than its header says",
            expected=f"{end} bytes",
            found=f"{size} bytes",
            remedy="Download the file again",
            file=path,
        )
    return dict(ordered)


def _shortened(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
