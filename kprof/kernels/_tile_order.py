"""In which order tiles are worked off: the longest first, and neighbours share what they read."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def turn_of(turn, program, num_programs) -> tl.tensor:
    """Return which tile a program has in its n-th turn: to and fro, which evens lengths out."""
    is_back = turn % 2 == 1
    return turn * num_programs + tl.where(is_back, num_programs - 1 - program, program)


@triton.jit
def turns_of(num_tiles, program, num_programs) -> tl.tensor:
    """Return how many turns a program has."""
    whole = num_tiles // num_programs
    return whole + tl.where(turn_of(whole, program, num_programs) < num_tiles, 1, 0)


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
