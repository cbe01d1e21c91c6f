"""One step of the online softmax over scores still to be scaled, as products leave them.

In such a tile four threads share a row; a thread has a pair of every eight columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kprof.kernels._tile_softmax import shift_of


@triton.jit
def weigh_scores(score_MN, top_M, largest_M, scale, RAISE: tl.constexpr = 0) -> tl.tensor:
    """Do as `weigh` of `_tile_softmax` with scores to be multiplied by a scale above 0.

    Scaling and subtracting are one instruction then. `top_M` is the largest of these scores in each
    row. The weights, how sums so far shrink, and the largest scores are returned; adding weights up
    is for `parts_of`. Weights are multiplied by two to the power of RAISE.
    """
    larger_M = tl.maximum(largest_M, top_M)
    shift_M = shift_of(larger_M) * scale
    shrink_M = tl.exp2(largest_M * scale - shift_M)
    weight_MN = tl.exp2(score_MN * scale - (shift_M - RAISE)[:, None])
    return weight_MN, shrink_M, larger_M


@triton.jit
def largest_of(score_MN) -> tl.tensor:
    """Return the largest of each row: of pairs first, which do not wait for one another."""
    M: tl.constexpr = score_MN.shape[0]
    N: tl.constexpr = score_MN.shape[1]
    low_MN, high_MN = tl.split(score_MN.reshape([M, N // 2, 2]))
    return tl.max(tl.maximum(low_MN, high_MN), axis=1)


@triton.jit
def parts_of(weight_MN) -> tl.tensor:
    """Return the sum of each row in four parts, one for each thread; who adds them up waits."""
    M: tl.constexpr = weight_MN.shape[0]
    N: tl.constexpr = weight_MN.shape[1]
    return tl.sum(tl.sum(weight_MN.reshape([M, N // 8, 4, 2]), axis=3), axis=1)
