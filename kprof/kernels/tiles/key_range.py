"""Which keys a tile of queries sees, where a mask is needed, and in which order tiles run.

Row i of a sequence of T queries over N keys stands at the key i + N - T, its own. It sees from
`left` keys before that to `right` keys after; a missing bound sees all. The tile scheduler takes
the longest tiles first, and neighbours share keys.
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
    """Return the ends of three ranges of keys: masked, seen by all of these rows, masked.

    They come as `begin`, `inner_begin`, `inner_end` and `end`. All but the last are multiples of
    BLOCK; nobody sees anything outside, and a range may be empty.

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
    """Return which of these keys each row sees, whose own keys are `own_M`."""
    is_seen_MN = (key_N < num_keys)[None, :] & (own_M == own_M)[:, None]
    if HAS_LEFT:
        is_seen_MN &= key_N[None, :] >= (own_M - left)[:, None]
    if HAS_RIGHT:
        is_seen_MN &= key_N[None, :] <= (own_M + right)[:, None]
    return is_seen_MN


@triton.jit
def sequence_at(starts, place) -> tl.tensor:
    """Return where a sequence begins among those that lie one after another, and its length."""
    start = tl.load(starts + place).to(tl.int64)
    return start, (tl.load(starts + place + 1) - start).to(tl.int32)


@triton.jit
def snake_tile(turn, program, num_programs) -> tl.tensor:
    """Return which tile a program has in its n-th turn: to and fro, which evens lengths out."""
    is_back = turn % 2 == 1
    return turn * num_programs + tl.where(is_back, num_programs - 1 - program, program)


@triton.jit
def num_snake_tiles(num_tiles, program, num_programs) -> tl.tensor:
    """Return how many turns a program has."""
    whole = num_tiles // num_programs
    return whole + tl.where(snake_tile(whole, program, num_programs) < num_tiles, 1, 0)


@triton.jit
def tile_at(place, num_blocks, num_heads, together, IS_FALLING: tl.constexpr) -> tl.tensor:
    """Return the block of queries and the head that come at a place.

    Heads are worked off `together` at a time, so that L2 holds their keys and values. Among those
    the last block comes first where lengths are falling: all heads' longest tiles, then the next.
    """
    section = place // (together * num_blocks)
    width = tl.minimum(num_heads - section * together, together)
    within = place - section * together * num_blocks
    block = within // width
    if IS_FALLING:
        block = num_blocks - 1 - block
    return block, section * together + within % width
