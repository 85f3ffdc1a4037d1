"""The digest `mix64` as a Triton kernel; imported only where it has to be compiled (see `cuda_digest`)."""

# mypy: ignore-errors
import triton
import triton.language as tl

BLOCK: tl.constexpr = tl.constexpr(1024)
"""Words that one step of a program reads: 8 a thread, enough loads in flight to keep HBM busy."""


@triton.jit
def mix(word):
    # The mixer wants shifts that fill with zeros; Triton's are arithmetic unless the type is unsigned.
    word = (word ^ (word >> 32)) * 0xD6E8FEB86659FD93
    word = (word ^ (word >> 32)) * 0xD6E8FEB86659FD93
    return word ^ (word >> 32)


@triton.jit
def mix64_sums(
    addresses,  # of each row's first byte, a multiple of 16
    sizes,  # bytes of each row
    first_tiles,  # number of each row's first tile
    rows,  # how many
    sums,  # one a row, zero at the start
    first_tile,  # of this launch
    tile_words: tl.constexpr,
):
    tile = first_tile + tl.program_id(0).to(tl.int64)
    # The row of this tile is the last one that begins at or before it; rows without bytes have no tile.
    row = tl.zeros((), tl.int64)
    beyond = rows
    while beyond - row > 1:
        middle = (row + beyond) // 2
        if tl.load(first_tiles + middle) <= tile:
            row = middle
        else:
            beyond = middle
    size = tl.load(sizes + row)
    base = tl.load(addresses + row).to(tl.pointer_type(tl.uint64))
    base = tl.multiple_of(base, 16)
    begin = (tile - tl.load(first_tiles + row)) * tile_words
    whole = size // 8
    lanes = tl.arange(0, BLOCK)
    key = (begin + lanes + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    total = tl.zeros((BLOCK,), dtype=tl.uint64)
    if begin + tile_words <= whole:
        for start in range(0, tile_words, BLOCK):
            word = tl.load(base + begin + start + lanes)
            total += mix(word ^ key)
            key += (BLOCK * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    else:
        for start in range(0, tile_words, BLOCK):
            inside = begin + start + lanes < whole
            word = tl.load(base + begin + start + lanes, mask=inside, other=0)
            total += tl.where(inside, mix(word ^ key), 0)
            key += (BLOCK * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        rest = size % 8
        if (rest > 0) & (whole < begin + tile_words):
            # The arena's end is a multiple of 8, so the last word may be read whole.
            last = tl.load(base + whole) & ((1 << (rest * 8).to(tl.uint64)) - 1)
            tail = mix(last ^ ((whole + 1).to(tl.uint64) * 0x9E3779B97F4A7C15))
            total += tl.where(lanes == 0, tail, 0)
    if begin == 0:  # word 0 is the length
        total += tl.where(lanes == 0, mix(size.to(tl.uint64)), 0)
    tl.atomic_add(sums + row, tl.sum(total, axis=0), sem="relaxed")
