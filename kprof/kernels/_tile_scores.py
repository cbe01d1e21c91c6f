"""One step of the online softmax over scores still to be scaled, as products leave them.

In such a tile four threads share a row; a thread has a pair of every eight columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kprof.kernels._tile_softmax import shift_of


@triton.jit
def raise_largest(top_M, largest_M, scale) -> tl.tensor:
    """Return how sums so far shrink, and the largest scores, with `top_M` those of this tile.

    Scores are still to be multiplied by a scale above 0.
    """
    larger_M = tl.maximum(largest_M, top_M)
    # Exactly 1 where no score was larger.
    return tl.exp2((largest_M - shift_of(larger_M)) * scale), larger_M


@triton.jit
def weigh_scores(score_MN, largest_M, scale, RAISE: tl.constexpr = 0) -> tl.tensor:
    """Return the weights of scores to be multiplied by a scale, of which the largest are known.

    Scaling and subtracting are one instruction then. Adding weights up is for `parts_of`. Weights
    are multiplied by two to the power of RAISE.
    """
    return tl.exp2(tl.fma(score_MN, scale, (RAISE - shift_of(largest_M) * scale)[:, None]))


@triton.jit
def settle(total_M, largest_M, scale, DTYPE: tl.constexpr) -> tl.tensor:
    """Return the totals of weights with the largest of each row as it was rounded to be multiplied.

    Where scores are in the thousands, that is not quite 1: what it is lowered by was rounded, and
    the products of its row were not. A query that sees little but one key has that key's value all
    the same, to the last bit; its gradient then is 0, as it should be, and not a rounding error
    times scores.
    """
    weight_M = tl.exp2(tl.fma(largest_M, scale, -shift_of(largest_M) * scale))
    return total_M + (weight_M.to(DTYPE).to(tl.float32) - weight_M)


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
