"""The keys that a tile of queries sees, with the order of tiles.

Attention is aligned at the end: row i of T queries over N keys has the key i + N - T
as its own. It sees from `left` keys before that to `right` keys after; a missing bound sees all.
The tile scheduler takes the longest tiles first, and consecutive tiles share keys in L2.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_ranges(
    first_own,
    rows,
    num_keys,
    left,
    right,
    BLOCK: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
) -> tl.tensor:
    """Return the bounds of three ranges of keys: masked, seen by all of these rows, masked.

    The bounds are `begin`, `inner_begin`, `inner_end` and `end`; all but the last are multiples of
    BLOCK. No row sees a key outside, and a range may be empty.

    Args:
        first_own: The first row's own key.
        rows: How many rows follow one another.
        num_keys: Of the sequence.
        left: How many keys before its own a row sees.
        right: How many keys after its own a row sees.
        BLOCK: Keys of a block.
        HAS_LEFT: Whether there is a bound on the left.
        HAS_RIGHT: Whether there is one on the right.
    """
    begin = num_keys * 0
    inner_begin, inner_end, end = begin, num_keys, num_keys
    if HAS_LEFT:
        begin = tl.maximum(first_own - left, 0) // BLOCK * BLOCK
        inner_begin = tl.cdiv(tl.maximum(first_own + rows - 1 - left, 0), BLOCK) * BLOCK
    if HAS_RIGHT:
        end = tl.minimum(tl.maximum(first_own + rows + right, 0), num_keys)
        inner_end = tl.minimum(tl.maximum(first_own + right + 1, 0), num_keys)
    end = tl.maximum(end, begin)
    inner_begin = tl.minimum(inner_begin, tl.cdiv(end, BLOCK) * BLOCK)
    inner_end = tl.maximum(inner_end // BLOCK * BLOCK, inner_begin)
    return begin, inner_begin, inner_end, end


@triton.jit
def is_visible(
    own_M, key_N, num_keys, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr
) -> tl.tensor:
    """Return which of these keys each row sees; `own_M` are the rows' own keys."""
    is_seen_MN = (key_N < num_keys)[None, :] & (own_M == own_M)[:, None]
    if HAS_LEFT:
        is_seen_MN &= key_N[None, :] >= (own_M - left)[:, None]
    if HAS_RIGHT:
        is_seen_MN &= key_N[None, :] <= (own_M + right)[:, None]
    return is_seen_MN


@triton.jit
def sequence_at(starts, place) -> tl.tensor:
    """Return where a sequence of `cu_seqlens` begins, and its length."""
    start = tl.load(starts + place).to(tl.int64)
    return start, (tl.load(starts + place + 1) - start).to(tl.int32)


@triton.jit
def snake_tile(turn, program, num_programs) -> tl.tensor:
    """Return a CTA's n-th tile in snake order, which evens out lengths."""
    is_back = turn % 2 == 1
    return turn * num_programs + tl.where(is_back, num_programs - 1 - program, program)


@triton.jit
def num_snake_tiles(num_tiles, program, num_programs) -> tl.tensor:
    """Return how many tiles a CTA has in snake order."""
    whole = num_tiles // num_programs
    return whole + tl.where(snake_tile(whole, program, num_programs) < num_tiles, 1, 0)


@triton.jit
def tile_at(place, num_blocks, num_heads, together, IS_FALLING: tl.constexpr) -> tl.tensor:
    """Return the block of queries and the head of the tile at an index.

    Heads come in sections whose keys and values fit L2. In a section, tiles of one block of all
    heads are consecutive; with IS_FALLING the last block, whose tiles are the longest, comes first.
    """
    section = place // (together * num_blocks)
    width = tl.minimum(num_heads - section * together, together)
    within = place - section * together * num_blocks
    block = within // width
    if IS_FALLING:
        block = num_blocks - 1 - block
    return block, section * together + within % width
