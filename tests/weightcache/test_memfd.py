"""Arenas in host memory: reserved before they are filled, sealed for good, mapped so that nobody harms another."""

import gc
import mmap
import os
from pathlib import Path

import pytest
import torch
from tests.weightcache.caches import descriptors, few_descriptors
from tests.weightcache.publishing import packed

from weightcache.arena import huge_pages, memfd
from weightcache.arena.memfd import MemfdMapping, MemfdWriter
from weightcache.arena.seals import SEALS, seals
from weightcache.errors import ImportRejected, ResourceError
from weightcache.memory import Available


def sealed(size: int = 4096) -> int:
    writer = MemfdWriter(size)
    writer.write(0, torch.arange(size, dtype=torch.uint8))
    (descriptor,) = writer.seal()
    writer.close()
    return descriptor


def test_space_is_reserved_before_anything_is_written() -> None:
    writer = MemfdWriter(8 << 20)
    (descriptor,) = writer.seal()
    assert os.fstat(descriptor).st_blocks * 512 >= 8 << 20
    os.close(descriptor)


def test_what_does_not_fit_is_refused_with_both_counts_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    with pytest.raises(ResourceError) as full:
        MemfdWriter(1 << 50)
    assert full.value.detail == "memory"
    assert full.value.data["needed"] == 1 << 50
    assert full.value.data["available"] < 1 << 50
    rooms = iter([1 << 40, 1 << 40, 0])  # somebody else takes the memory meanwhile
    monkeypatch.setattr(memfd.memory, "available", lambda: Available(next(rooms), "a limit"))
    with pytest.raises(ResourceError, match="a limit"):
        MemfdWriter(300 << 20)
    assert descriptors() == before


def test_an_arena_that_is_given_up_half_way_leaves_nothing() -> None:
    before = descriptors()
    writer = MemfdWriter(4096)
    writer.write(0, torch.ones(16))
    writer.close()
    writer.close()
    assert descriptors() == before


def test_without_a_descriptor_there_is_no_arena() -> None:
    with few_descriptors(left=0), pytest.raises(ResourceError) as lack:
        MemfdWriter(4096)
    assert lack.value.detail == "descriptors"


def test_nobody_writes_to_a_sealed_arena() -> None:
    descriptor = sealed()
    assert seals(descriptor) & SEALS == SEALS
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", 0)
    for size in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.write(again, b"x")
    os.close(again)
    os.close(descriptor)


@pytest.mark.parametrize("size", [4095, 4097])
def test_another_size_than_promised_is_refused(size: int) -> None:
    descriptor = sealed()
    with pytest.raises(ImportRejected, match="another size"):
        MemfdMapping(descriptor, size)
    os.close(descriptor)


def test_what_is_no_sealed_memory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(4096))
    plain = os.open(tmp_path / "file", os.O_RDONLY)
    pipe = os.pipe()
    for descriptor in (plain, pipe[0]):
        with pytest.raises(ImportRejected, match="not sealed"):
            MemfdMapping(descriptor, 4096)
    for descriptor in (plain, *pipe):
        os.close(descriptor)


def test_a_mapping_is_private_and_ends_with_its_last_tensor() -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count(f" {inode} ")

    what = packed()
    inode = os.fstat(what.descriptors[1]).st_ino
    one = MemfdMapping(what.descriptors[1], what.manifest.size).views(what.manifest)
    other = MemfdMapping(what.descriptors[1], what.manifest.size).views(what.manifest)
    row = what.manifest.names.index("embed.weight")
    one[row].zero_()
    assert other[row].any()
    assert not one[row].any()
    what.close()
    assert mappings() >= 2
    last = other[row]
    del one, other
    gc.collect()
    assert last.any()
    del last
    gc.collect()
    assert mappings() == 0


def test_an_arena_lies_in_huge_pages_and_one_write_harms_one_copy_of_one() -> None:
    size = (5 << 20) + 4096
    content = torch.arange(size, dtype=torch.int64).to(torch.uint8)
    writer = MemfdWriter(size)
    writer.write(0, content)
    (descriptor,) = writer.seal()
    first, second = MemfdMapping(descriptor, size), MemfdMapping(descriptor, size)
    os.close(descriptor)
    mine, theirs = (torch.frombuffer(mapping._memory, dtype=torch.uint8) for mapping in (first, second))
    assert torch.equal(mine, content)
    assert mapped_huge(mine.data_ptr()) == 4 << 20, "two of 2 MiB; the rest is small"
    mine[7] += 1
    assert torch.equal(theirs, content)
    assert torch.equal(mine[8:], content[8:])


def test_where_a_kernel_has_no_huge_pages_an_arena_lies_in_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_MADV_COLLAPSE", 9999)  # as unknown as the real one is before Linux 6.1
    size = 5 << 20
    writer = MemfdWriter(size)
    writer.write(0, torch.ones(size, dtype=torch.uint8))
    (descriptor,) = writer.seal()
    mapping = MemfdMapping(descriptor, size)
    os.close(descriptor)
    there = torch.frombuffer(mapping._memory, dtype=torch.uint8)
    assert there.sum() == size
    assert mapped_huge(there.data_ptr()) == 0


def mapped_huge(address: int) -> int:
    """How much of a mapping of a memory file is mapped in huge pages, in bytes."""
    ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            begin, end = (int(word, 16) for word in words[0].split("-"))
            ours = begin <= address < end
        elif ours and words[0] == "ShmemPmdMapped:":
            return int(words[1]) << 10
    raise AssertionError(f"nothing is mapped at {address:#x}")
