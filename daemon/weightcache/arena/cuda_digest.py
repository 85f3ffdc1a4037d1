"""The digest `mix64`: 64 bits that change when any byte of a tensor does, at the speed of GPU memory.

Word 0 is the tensor's length in bytes; words 1, 2, ... are its bytes as little-endian 64-bit words, the last one filled
up with zeros. Modulo 2**64::

    mix(x) = twice x ^= x >> 32; x *= 0xD6E8FEB86659FD93; and once more x ^= x >> 32
    digest = sum over i of mix(word[i] ^ i * 0x9E3779B97F4A7C15)

`mix` (T. Degski's mixer) is a bijection, so a change inside one word always changes the digest, and any other change
escapes with a chance of 2**-64. The position keys tell swapped words apart. It guards against accidents, not against
somebody who looks for a collision.

On a GPU one Triton kernel takes all rows at once. Compiling it, and even letting Triton find what it compiled earlier
(it hashes 400 MB of its own), takes longer than reading 96 GiB, so the compiled kernel is kept in a file of ours:
a process that finds it there imports no Triton. Where neither is there, plain torch does the same, slower.
"""

import functools
import hashlib
import json
import logging
import os
import threading
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from weightcache.arena.cuda_driver import Driver, DriverError
from weightcache.digest import tensor_memory

ALGORITHM: Final = "mix64"
SIZE: Final = 8
"""Bytes of a digest, little-endian."""

_GOLDEN: Final = 0x9E3779B97F4A7C15
_FACTOR: Final = 0xD6E8FEB86659FD93
_TILE_WORDS: Final = 65536
"""Words a program reads: 512 KiB, small enough to spread one 8B model over all multiprocessors evenly."""
_STEP_WORDS: Final = 1 << 24
"""Words that the torch formula takes at once; its temporaries are a few times these 128 MiB."""
_ALIGNMENT: Final = 16
"""The kernel loads 16 bytes at a time."""
_log = logging.getLogger("weightcache.arena.cuda_digest")


def start(
    arena: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int], driver: Driver | None = None
) -> Callable[[], bytes]:
    """Begin to compute the digests of an arena's rows.

    Args:
        arena: uint8, one dimension; its length is a multiple of 8.
        offsets: first byte of each row.
        sizes: bytes of each row.
        driver: where the arena's kernels run; None computes with torch, on whatever device the arena is.

    Returns:
        A function that waits for them: `SIZE` bytes each, end to end. A GPU works on them meanwhile.
    """
    kernel = _kernel(driver, arena.device) if driver is not None and arena.is_cuda else None
    if kernel is None:
        return functools.partial(_in_torch, arena, offsets, sizes)
    return kernel.start(arena, offsets, sizes)


def ahead(arena: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int], driver: Driver) -> "Sums | None":
    """The digests of the rows of an arena of which not everything is mapped yet; see `start` for the arguments.

    Returns:
        None where they can only be computed from the whole arena, by `start`: without the kernel, or with rows at odd
        addresses.
    """
    kernel = _kernel(driver, arena.device) if arena.is_cuda else None
    starts = _column(offsets)
    if kernel is None or bool((starts % _ALIGNMENT).any()):
        return None
    return Sums(kernel, arena.device, starts + arena.data_ptr(), _column(sizes))


def prepare(driver: Driver, device: int) -> bool:
    """Load the kernel, compiling it if this node has never done so. False where plain torch will have to do."""
    where = torch.device("cuda", device)
    kernel = _kernel(driver, where)
    if kernel is None:
        return False
    nothing = torch.zeros(1, dtype=torch.int64)
    Sums(kernel, where, nothing, nothing).launch(0)  # what torch sets up on first use; there is nothing to start on
    return True


# -- in torch -------------------------------------------------------------------------------------------------------


def _in_torch(arena: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> bytes:
    rows = (arena[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True))
    return b"".join(_digest(row).to_bytes(SIZE, "little") for row in rows)


def _digest(row: torch.Tensor) -> int:
    if row.storage_offset() % 8:  # a view of wider elements must start at a multiple of them
        row = row.clone()
    whole = row.numel() // 8
    words = row[: whole * 8].view(torch.int64)
    total = int(_mix(torch.tensor([row.numel()])))
    for start in range(0, whole, _STEP_WORDS):
        step = words[start : start + _STEP_WORDS]
        keys = torch.arange(start + 1, start + step.numel() + 1, dtype=torch.int64, device=row.device)
        total += int(_mix(step ^ keys.mul_(_signed(_GOLDEN))).sum())
    if row.numel() % 8:
        last = int.from_bytes(bytes(row[whole * 8 :].tolist()), "little")
        key = (whole + 1) * _GOLDEN % 2**64
        total += int(_mix(torch.tensor([_signed(last ^ key)])))
    return total % 2**64


def _mix(words: torch.Tensor) -> torch.Tensor:
    low = 0xFFFFFFFF  # int64 shifts keep the sign; what they shift in is cut off
    for _ in range(2):
        words = (words ^ ((words >> 32) & low)) * _signed(_FACTOR)
    return words ^ ((words >> 32) & low)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


# -- in Triton ------------------------------------------------------------------------------------------------------


class _Image(NamedTuple):
    """A compiled kernel and how it is started; `parameters` counts the scratch pointers that Triton adds to ours."""

    code: bytes
    name: str
    threads: int
    shared: int
    parameters: int


class Kernel:
    """The kernel, loaded into this process's context."""

    def __init__(self, driver: Driver, image: _Image) -> None:
        self._driver = driver
        self._image = image
        self._function: Any = driver.load_function(image.code, image.name)

    def start(self, arena: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Callable[[], bytes]:
        """Begin to compute the rows' digests; see `start`."""
        starts, lengths = _column(offsets), _column(sizes)
        addresses = starts + arena.data_ptr()
        moved = []
        if bool((addresses % _ALIGNMENT).any()):
            for row in (addresses % _ALIGNMENT).nonzero().flatten().tolist():
                moved.append(torch.empty(-(-sizes[row] // 8) * 8, dtype=torch.uint8, device=arena.device))
                moved[-1][: sizes[row]] = arena[offsets[row] : offsets[row] + sizes[row]]
                addresses[row] = moved[-1].data_ptr()
        sums = Sums(self, arena.device, addresses, lengths)
        sums.launch()
        return functools.partial(_collect, sums, moved)

    def launch(self, first: int, tiles: int, table: torch.Tensor) -> None:
        """Start on so many tiles of a table of `Sums`."""
        pointer, column = table.data_ptr(), table.shape[1] * 8
        arguments = [pointer, pointer + column, pointer + 2 * column, table.shape[1], pointer + 3 * column, first]
        arguments += [0] * (self._image.parameters - len(arguments))
        stream = torch.cuda.current_stream(table.device).cuda_stream
        self._driver.launch(self._function, tiles, self._image.threads, self._image.shared, stream, arguments)


class Sums:
    """The digests of rows of GPU memory, begun row by row as the memory is mapped.

    Args:
        kernel: computes them.
        device: of the memory.
        addresses: int64, the rows' first bytes, each a multiple of 16.
        lengths: int64, the rows' bytes.
    """

    def __init__(self, kernel: Kernel, device: torch.device, addresses: torch.Tensor, lengths: torch.Tensor) -> None:
        tiles = (lengths + (_TILE_WORDS * 8 - 1)) // (_TILE_WORDS * 8)
        self._kernel = kernel
        self._last_tiles = tiles.cumsum(0)
        self._furthest = (addresses + lengths).cummax(0).values
        # One copy for all four columns, the sums at zero among them: no kernel of torch's has to be loaded for it.
        columns = [addresses, lengths, self._last_tiles - tiles, torch.zeros_like(lengths)]
        self._table = torch.stack(columns).to(device)
        self._launched = 0

    def launch(self, mapped: int | None = None) -> None:
        """Start on the rows that end at or before an address and are not begun; on all that are left if None."""
        rows = len(self._furthest)
        if mapped is not None:
            rows = int(torch.searchsorted(self._furthest, mapped, right=True))
        tiles = int(self._last_tiles[rows - 1]) if rows else 0
        if tiles > self._launched:
            self._kernel.launch(self._launched, tiles - self._launched, self._table)
            self._launched = tiles

    def collect(self) -> bytes:
        """Wait for the digests, once every row was begun: `SIZE` bytes each, end to end."""
        found = self._table[3].cpu()
        return bytes(tensor_memory(found))  # hosts of NVIDIA GPUs are little-endian


def _column(numbers: Sequence[int]) -> torch.Tensor:
    return torch.frombuffer(array("q", numbers or [0]), dtype=torch.int64)


def _collect(sums: Sums, _read: object) -> bytes:
    """The digests, once the kernel has written them and so has no more use for the copies that it reads."""
    return sums.collect()


_kernels: dict[tuple[int, int], Kernel | None] = {}
_loading = threading.Lock()


def _kernel(driver: Driver, device: torch.device) -> Kernel | None:
    key = (id(driver), device.index)
    with _loading:  # several threads may attach
        if key not in _kernels:
            _kernels[key] = _load(driver, device.index)
        return _kernels[key]


def _load(driver: Driver, device: int) -> Kernel | None:
    capability = driver.capability(device)
    path = _kept(capability)
    image = _read(path)
    if image is not None:
        try:
            return Kernel(driver, image)
        except DriverError as error:
            _log.warning("the kernel kept in %s does not load and is compiled again: %s", path, error)
    try:
        image = _compile(capability)
    except ImportError as error:
        _log.warning("Triton is missing, so weights are verified with plain torch, several times slower: %s", error)
        return None
    kernel = Kernel(driver, image)
    _prove(kernel, device)
    _keep(path, image)
    return kernel


def _compile(capability: tuple[int, int]) -> _Image:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from weightcache.arena.mix64_kernel import mix64_sums

    signature = {"addresses": "*i64", "sizes": "*i64", "first_tiles": "*i64", "rows": "i64", "sums": "*i64"}
    signature["first_tile"] = "i64"
    source = ASTSource(mix64_sums, {**signature, "tile_words": "constexpr"}, {"tile_words": _TILE_WORDS})
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    compiled = triton.compile(source, target=target, options={"num_warps": 4})
    entry = compiled.asm["ptx"].split(".entry", 1)[1].split(")", 1)[0]
    meta = compiled.metadata
    return _Image(compiled.asm["cubin"], meta.name, meta.num_warps * 32, meta.shared, entry.count(".param"))


def _prove(kernel: Kernel, device: int) -> None:
    """Compare a fresh kernel with the torch formula, once, before weights are condemned on its word.

    Raises:
        AssertionError: they differ.
    """
    generator = torch.Generator().manual_seed(1)
    content = torch.randint(0, 256, (2 * _TILE_WORDS * 8 + 4096,), dtype=torch.uint8, generator=generator)
    offsets = [0, 0, 16, 32, 48, 100, 200]
    sizes = [content.numel(), _TILE_WORDS * 8, 0, 13, 8, 1001, 0]
    found = kernel.start(content.to(torch.device("cuda", device)), offsets, sizes)()
    expected = _in_torch(content, offsets, sizes)
    if found != expected:
        raise AssertionError(f"the compiled digest kernel is wrong: expected {expected.hex()}, found {found.hex()}")


def _kept(capability: tuple[int, int]) -> Path:
    """Where the compiled kernel of this source is kept."""
    with open(os.path.join(os.path.dirname(__file__), "mix64_kernel.py"), "rb") as file:
        source = file.read() + b"%d" % _TILE_WORDS
    home = os.environ.get("READMIT_HOME")
    folder = Path(home) if home else Path.home() / ".cache" / "readmit"
    name = f"mix64-sm{capability[0]}{capability[1]}-{hashlib.sha256(source).hexdigest()[:16]}"
    return folder / "kernels" / name


def _read(path: Path) -> _Image | None:
    try:
        heading, _, code = path.read_bytes().partition(b"\n")
        facts = json.loads(heading)
        return _Image(code, facts["name"], facts["threads"], facts["shared"], facts["parameters"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        _log.warning("the kernel kept in %s cannot be read and is compiled again: %s", path, error)
        return None


def _keep(path: Path, image: _Image) -> None:
    facts = {"name": image.name, "threads": image.threads, "shared": image.shared, "parameters": image.parameters}
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        unfinished.write_bytes(json.dumps(facts).encode() + b"\n" + image.code)
        unfinished.replace(path)  # whoever reads at this moment sees all of it or nothing
    except OSError as error:
        _log.warning("the compiled kernel cannot be kept in %s, so every process compiles it: %s", path, error)
