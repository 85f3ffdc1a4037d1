"""From files to memory: what is read, hashed, and put where. Pinned buffers and streams were run on a GPU."""

import os
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcache.arena import cuda_fill
from weightcache.arena.cuda_fill import Piece, fill
from weightcache.digest import new_hash
from weightcache.errors import CheckpointError

PAGE, BLOCK = 4096, cuda_fill.BLOCK_BYTES
FILE = Path("model.safetensors")


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 3 * BLOCK), min_size=1, max_size=12),
    gap=st.integers(0, 3 * PAGE),
    head=st.integers(0, 9000),
)
def test_every_byte_of_every_piece_is_read_once_in_page_aligned_blocks(sizes: list[int], gap: int, head: int) -> None:
    pieces, at, into = [], head, 0
    for size in sizes:
        pieces.append(Piece(FILE, at, size, into))
        at, into = at + size + gap, into + size + 256
    covered = []
    for block in cuda_fill._blocks(FILE, pieces[::-1]):
        assert block.start % PAGE == block.size % PAGE == 0
        assert block.size <= BLOCK + PAGE
        for _, start, target, size in block.parts:
            assert start >= 0
            assert start + size <= block.size
            covered.append((target, block.start + start, size))
    covered.sort()
    for piece in pieces:
        parts = [part for part in covered if piece.into <= part[0] < piece.into + piece.size]
        assert sum(size for _, _, size in parts) == piece.size
        assert all(position - piece.offset == target - piece.into for target, position, _ in parts)


def test_neighbours_share_a_block() -> None:
    pieces = [Piece(FILE, 100 + 1000 * number, 1000, 1024 * number) for number in range(50)]
    (block,) = cuda_fill._blocks(FILE, pieces)
    assert (block.start, len(block.parts)) == (0, 50)


@pytest.mark.parametrize("around", [True, False])
def test_a_block_is_read_to_the_last_byte_of_a_file(tmp_path: Path, around: bool) -> None:
    content = os.urandom(3 * PAGE + 17)
    path = tmp_path / "shard"
    path.write_bytes(content)
    (block,) = cuda_fill._blocks(path, [Piece(path, 5, len(content) - 5, 0)])
    import mmap

    buffer = mmap.mmap(-1, 16 * PAGE)
    descriptor = cuda_fill._open(path, around)
    cuda_fill._read(descriptor, block, memoryview(buffer)[: block.size])
    os.close(descriptor)
    ((_, start, _, size),) = block.parts
    assert buffer[start : start + size] == content[5:]


def test_a_file_that_ends_early_is_an_error_with_both_lengths(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(bytes(PAGE))
    (block,) = cuda_fill._blocks(path, [Piece(path, 0, 2 * PAGE, 0)])
    descriptor = cuda_fill._open(path, False)
    with pytest.raises(CheckpointError) as caught:
        cuda_fill._read(descriptor, block, memoryview(bytearray(block.size)))
    os.close(descriptor)
    assert caught.value.reason == "truncated"
    assert (caught.value.expected, caught.value.found) == (f"{2 * PAGE} bytes", f"{PAGE} bytes")


def test_a_file_that_is_not_there_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        cuda_fill._open(tmp_path / "gone", True)
    assert caught.value.reason == "unreadable"
    assert caught.value.data["path"] == str(tmp_path / "gone")


@pytest.mark.parametrize("direct", [True, False, None])
def test_pieces_of_several_files_arrive_whole_with_their_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool | None
) -> None:
    monkeypatch.setattr(cuda_fill, "BLOCK_BYTES", 4 * PAGE)  # so that the large pieces take many blocks
    source = random.Random(5)
    pieces, contents, into = [], {}, 0
    for number in range(3):
        path = tmp_path / f"shard-{number}"
        sizes = [source.choice([1, 17, 3000, PAGE, 9 * PAGE + 5]) for _ in range(20)]
        content = source.randbytes(sum(sizes) + 100)
        path.write_bytes(content)
        at = 100
        for size in sizes:
            pieces.append(Piece(path, at, size, into))
            contents[into] = content[at : at + size]
            at, into = at + size, into + size + 64
    target = torch.zeros(into, dtype=torch.uint8)
    told: list[int] = []
    filled = fill(target, pieces, threads=4, direct=direct, done=told.append)
    memory = bytes(target.tolist())
    for place, content in contents.items():
        assert memory[place : place + len(content)] == content
        assert filled.digests[place] == new_hash(threads=1).update(content).digest()
    assert sum(told) == sum(map(len, contents.values())) <= filled.read


def test_an_error_of_a_thread_is_raised(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(bytes(PAGE))
    with pytest.raises(CheckpointError) as caught:
        fill(torch.zeros(3 * PAGE, dtype=torch.uint8), [Piece(path, 0, 3 * PAGE, 0)])
    assert caught.value.reason == "truncated"
