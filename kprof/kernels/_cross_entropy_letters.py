"""What programs that share a row of logits tell each other of it, and what warps of a program do.

M is rows, G the programs of a group, W the warps of each. Warps leave the maximum and the sum of
their shares of a piece in shared memory. Programs that share a row leave one letter each in memory,
and sum the next row before they look for the others'. Zeros are no letter.

A letter is one aligned word, read whole, and all that anybody is told: nothing else has to be
visible before it, so it needs no order, only to arrive. It is written into L2, and read there
(`volatile`). A program's letter for a row leaves before it waits for that row, and as all are in
one array, no compiler moves a write behind a later read.
"""

from __future__ import annotations

import triton.language as tl

from kprof.kernels._cross_entropy_pieces import (
    LOG2_E,
    finite,
    highest_of,
    nothing_left,
    sums_of,
)
from kprof.kernels._gluon import gl, gluon, mbarrier, product, tma

# A letter from nobody: a maximum of -inf, and a sum of -0.
NOBODY = gl.constexpr(-(1 << 55) + (1 << 31))
MINUS = gl.constexpr(1 << 31)
# In the place of a target that does not count; less than all others.
IGNORED = gl.constexpr(-2)
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def alike(num_warps):
    """Return a layout of at most 32 values, one to a lane, in which all warps hold them all."""
    return gl.BlockedLayout([1], [32], [num_warps], [0])


@gluon.jit
def begin_letters(
    ring,
    letters_MG,
    row,
    target,
    count,
    GROUP: gl.constexpr,
    LEAST: gl.constexpr,
    TILES: gl.constexpr,
    LANES: gl.constexpr,
):
    """Where rows are shared, sum the first one's piece, and leave a letter.

    Returns where shares lie, and what is left of the piece.
    """
    shares_W = gl.allocate_shared_memory(gl.int64, [gl.num_warps()], FLAT)
    left, phases = nothing_left(ring, TILES, LANES), 0
    if GROUP > 1:
        highest, total, left, phases = _sum(
            ring, 0, phases, shares_W, target, count, LEAST, TILES, LANES
        )
        _send(letters_MG, row, target, highest, total, GROUP)
        # What was read of the shares may be written over.
        gl.thread_barrier()
    return shares_W, left, phases


@gluon.jit
def sums_of_row(
    ring,
    stage,
    phases,
    shares_W,
    letters_MG,
    rows,
    targets,
    count,
    GROUP: gl.constexpr,
    LEAST: gl.constexpr,
    TILES: gl.constexpr,
    LANES: gl.constexpr,
):
    """Return a row's maximum, the sum about it, and what is left of the piece that is summed.

    That is this row's; where rows are shared, the next one's, summed while letters arrive. Of
    `rows` and `targets` the first is this row's, the second the next one's.
    """
    if GROUP > 1:
        words_G = _receive(letters_MG, rows[0], targets[0] != IGNORED, GROUP)
        highest, total, left, phases = _sum(
            ring, stage, phases, shares_W, targets[1], count, LEAST, TILES, LANES
        )
        _send(letters_MG, rows[1], targets[1], highest, total, GROUP)
        # Over the lanes: what a lane does alone, the assembler would do, and wait for the words,
        # before the next row is summed.
        while gl.min(words_G.to(gl.uint32), 0) == 0:
            words_G = _receive(letters_MG, rows[0], True, GROUP)
        highest, total = _merge(words_G)
    else:
        highest, total, left, phases = _sum(
            ring, stage, phases, shares_W, targets[0], count, LEAST, TILES, LANES
        )
    return highest, total, left, phases


@gluon.jit
def _sum(
    ring,
    stage,
    phases,
    shares_W,
    target,
    count,
    LEAST: gl.constexpr,
    TILES: gl.constexpr,
    LANES: gl.constexpr,
):
    """Return the maximum of a row's piece, the sum about it, and what is left, if the row counts.

    No warp waits for another but once, when each has left its share.
    """
    left = nothing_left(ring, TILES, LANES)
    if target != IGNORED:
        mbarrier.wait(ring[1].index(stage), phases >> stage & 1)
        phases ^= 1 << stage
        highest_W, total_W, left = sums_of(ring, stage, count, LEAST, TILES, LANES)
        shares_W.store(_word(highest_W, total_W))
    # Behind the barrier the boxes may be written again.
    tma.store_wait(0)
    gl.thread_barrier()
    # Each warp reads all, one of each in a lane.
    highest, total = _merge(shares_W.load(alike(gl.num_warps())))
    return highest, total, left, phases


@gluon.jit
def _word(highest, total):
    """Return both in a word; the sum with a minus, so that none is all zeros."""
    word = highest.to(gl.int32, bitcast=True).to(gl.int64) << 32
    return word | (total.to(gl.uint32, bitcast=True) | MINUS).to(gl.int64)


@gluon.jit
def _merge(words):
    """Return the maximum of all parts, and the sum of exponentials about it (about 0 for -inf)."""
    highest = (words >> 32).to(gl.int32).to(gl.float32, bitcast=True)
    minus = words.to(gl.int32).to(gl.float32, bitcast=True)
    whole = highest_of(highest, 0)
    share = gl.exp2((highest - finite(whole)) * LOG2_E)
    return whole, -1.0 * gl.sum(product(minus, share), 0)


@gluon.jit
def _send(letters_MG, row, target, highest, total, GROUP: gl.constexpr):
    """Leave a letter about a row's piece for the other programs, if the row counts."""
    place = row.to(tl.int64) * GROUP + gl.program_id(0) % GROUP
    gl.store(letters_MG + place, _word(highest, total), target != IGNORED)


@gluon.jit
def _receive(letters_MG, row, is_needed, GROUP: gl.constexpr):
    """Return the letters of a row, zeros where they are not there yet, one in a lane."""
    PADDED: gl.constexpr = 1 << (GROUP - 1).bit_length()
    member_G = gl.arange(0, PADDED, alike(gl.num_warps()))
    letters_G = letters_MG + row.to(tl.int64) * GROUP + member_G
    return gl.load(letters_G, (member_G < GROUP) & is_needed, other=NOBODY, volatile=True)
