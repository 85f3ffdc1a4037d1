"""The digest `mix64`: the formula, what it tells apart, and the file that keeps its compiled kernel."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcache.arena import cuda_digest, cuda_vmm

WORD = 2**64
GOLDEN, FACTOR = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93


def digest(content: bytes, offset: int = 0) -> bytes:
    arena = torch.frombuffer(
        bytearray(offset) + bytearray(content) + bytearray(-len(content) % 8 + 8), dtype=torch.uint8
    )
    return cuda_digest.start(arena, [offset], [len(content)])()


def by_the_book(content: bytes) -> bytes:
    """The formula of the module's docstring, word by word."""

    def mix(x: int) -> int:
        for _ in range(2):
            x = (x ^ x >> 32) * FACTOR % WORD
        return x ^ x >> 32

    padded = content + bytes(-len(content) % 8)
    words = [len(content)] + [int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8)]
    total = sum(mix(word ^ (number * GOLDEN % WORD)) for number, word in enumerate(words))
    return (total % WORD).to_bytes(8, "little")


def in_numpy(content: bytes) -> bytes:
    def mix(x: np.ndarray) -> np.ndarray:
        for _ in range(2):
            x = (x ^ (x >> np.uint64(32))) * np.uint64(FACTOR)
        return x ^ (x >> np.uint64(32))

    padded = len(content).to_bytes(8, "little") + content + bytes(-len(content) % 8)
    words = np.frombuffer(padded, dtype="<u8")
    keys = np.arange(len(words), dtype=np.uint64) * np.uint64(GOLDEN)
    return int(mix(words ^ keys).sum(dtype=np.uint64)).to_bytes(8, "little")


@settings(max_examples=60, deadline=None)
@given(content=st.binary(max_size=700), start=st.integers(0, 40))
def test_it_is_the_documented_formula_at_any_length_and_offset(content: bytes, start: int) -> None:
    assert digest(content, start) == by_the_book(content) == in_numpy(content)


def test_a_long_row_is_summed_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    content = random.Random(3).randbytes(8 * 1000 + 5)
    whole = digest(content)
    monkeypatch.setattr(cuda_digest, "_STEP_WORDS", 7)
    assert digest(content) == whole == by_the_book(content)


def test_it_tells_apart_what_weaker_sums_do_not() -> None:
    content = random.Random(1).randbytes(4096)
    words = [content[at : at + 8] for at in range(0, len(content), 8)]
    swapped = b"".join([words[1], words[0], *words[2:]])
    top_bits = bytearray(content)
    top_bits[7] ^= 0x80
    two_top_bits = bytearray(top_bits)
    two_top_bits[15] ^= 0x80
    variants = {
        "as it is": content,
        "complement": bytes(byte ^ 0xFF for byte in content),
        "two words swapped": swapped,
        "bit 63 of a word": bytes(top_bits),
        "bit 63 of two words": bytes(two_top_bits),
        "zeros": bytes(4096),
        "ones": b"\xff" * 4096,
        "fewer zeros": bytes(4088),
        "a byte of zeros more": bytes(4097),
        "reversed": content[::-1],
        "nothing": b"",
    }
    found = {digest(variant) for variant in variants.values()}
    assert len(found) == len(variants)


@settings(max_examples=100, deadline=None)
@given(content=st.binary(min_size=1, max_size=64), data=st.data())
def test_any_change_inside_one_word_changes_it(content: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, (len(content) - 1) // 8)) * 8
    size = min(8, len(content) - at)
    word = data.draw(st.binary(min_size=size, max_size=size).filter(lambda new: new != content[at : at + size]))
    assert digest(content[:at] + word + content[at + size :]) != digest(content)


def test_rows_are_independent_of_each_other_and_of_where_they_lie() -> None:
    content = random.Random(2).randbytes(3000)
    arena = torch.frombuffer(bytearray(content + content), dtype=torch.uint8)
    found = cuda_digest.start(arena, [0, 3000, 256, 3256], [1000, 1000, 77, 77])()
    assert found[:8] == found[8:16]
    assert found[16:24] == found[24:]
    assert found == b"".join(by_the_book(part) for part in (content[:1000],) * 2 + (content[256:333],) * 2)


def test_a_compiled_kernel_is_kept_by_its_source_and_read_back(
    tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("READMIT_HOME", str(tmp_path))
    path = cuda_digest._kept((9, 0))
    image = cuda_digest._Image(b"\x7fELF\n\x00code", "mix64_sums", 128, 32, 7)
    assert cuda_digest._read(path) is None
    cuda_digest._keep(path, image)
    assert cuda_digest._read(path) == image
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert cuda_digest._kept((10, 0)) != path


def test_a_damaged_kernel_file_is_no_kernel(tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("READMIT_HOME", str(tmp_path))
    path = cuda_digest._kept((9, 0))
    path.parent.mkdir(parents=True)
    for content in (b"", b"{}\ncode", b"no json\ncode"):
        path.write_bytes(content)
        assert cuda_digest._read(path) is None


def test_a_folder_that_takes_no_file_costs_speed_and_nothing_else(
    tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("READMIT_HOME", str(blocked))
    cuda_digest._keep(cuda_digest._kept((9, 0)), cuda_digest._Image(b"", "k", 1, 1, 1))
    assert "every process compiles it" in caplog.text


class CountedKernel:
    """In the place of a loaded kernel: which tiles it was started on, and how much was mapped by then."""

    def __init__(self) -> None:
        self.launched: list[tuple[int, int]] = []

    def launch(self, first: int, tiles: int, table: torch.Tensor) -> None:
        self.launched.append((first, tiles))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3 << 20)), min_size=1, max_size=20),
    steps=st.lists(st.integers(0, 64 << 20), max_size=6),
)
def test_each_tile_is_begun_once_and_only_when_its_row_is_mapped(rows: list[tuple[int, int]], steps: list[int]) -> None:
    tile = cuda_digest._TILE_WORDS * 8
    starts, lengths, end = [], [], 0
    for gap, size in rows:  # rows in any order of addresses, some empty
        starts.append(end if gap % 3 else max(0, end - size))
        lengths.append(size)
        end = max(end, starts[-1] + size)
    kernel = CountedKernel()
    sums = cuda_digest.Sums(kernel, torch.device("cpu"), torch.tensor(starts), torch.tensor(lengths))  # type: ignore[arg-type]
    tiles_of = [-(-size // tile) for size in lengths]
    for mapped in sorted(steps):
        sums.launch(mapped)
        begun = sum(tiles for _, tiles in kernel.launched)
        for row in range(len(rows)):
            if lengths[row] and sum(tiles_of[:row]) < begun:
                assert starts[row] + lengths[row] <= mapped
    sums.launch()
    covered = [number for first, tiles in kernel.launched for number in range(first, first + tiles)]
    assert covered == list(range(sum(tiles_of)))


def test_every_step_of_mapping_may_take_twice_as_long_and_the_last_ends_with_the_last_chunk() -> None:
    assert [cuda_vmm._steps(count) for count in (1, 4, 5, 8, 12, 48)] == [
        [1],
        [2, 4],
        [2, 5],
        [2, 6, 8],
        [2, 6, 12],
        [2, 6, 14, 30, 48],
    ]
