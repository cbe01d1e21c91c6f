"""Online softmax over tiles of keys, in registers: its state, one step, its end, merging.

Powers are of 2, so scores come multiplied by log2(e). A row's state is the largest score so far,
the sum of powers, and the sum of values weighted by them. A row that saw nothing but -inf has the
result 0 and the log-sum-exp -inf. Where scores come unscaled from the tensor cores, four threads
share a row, and a thread has a pair of every eight columns.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def shift_of(largest) -> tl.tensor:
    """Return the shift of the scores: the largest one, or 0 for -inf, as -inf - (-inf) is NaN."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def weigh(score_MN, largest_M, total_MN) -> tl.tensor:
    """Process a tile's scores: return its weights, the factor for sums so far, and the new state.

    The total is kept for each column of the tile and summed at the end: a sum over columns crosses
    warps, which would wait for one another in every step.
    """
    larger_M = tl.maximum(largest_M, tl.max(score_MN, axis=1))
    shift_M = shift_of(larger_M)
    shrink_M = tl.exp2(largest_M - shift_M)
    weight_MN = tl.exp2(score_MN - shift_M[:, None])
    return weight_MN, shrink_M, larger_M, total_MN * shrink_M[:, None] + weight_MN


@triton.jit
def finish(sum_MD, largest_M, total_M) -> tl.tensor:
    """Return the weighted mean of the values, and log2 of the sum of all powers."""
    is_empty = total_M == 0.0
    # With weights of 0, a NaN among the values has made the sum NaN.
    mean_MD = tl.where(is_empty[:, None], 0.0, sum_MD / total_M[:, None])
    return mean_MD, tl.where(is_empty, float("-inf"), largest_M + tl.log2(total_M))


@triton.jit
def store_part(mean_MD, lse_M, mean_SMD, lse_SM, part, ROWS: tl.constexpr) -> None:
    """Store the first ROWS rows of a split's mean and log-sum-exp, as `merge` reads them."""
    row_M, column_D = tl.arange(0, mean_MD.shape[0]), tl.arange(0, mean_MD.shape[1])
    at_M = part * ROWS + row_M
    at_MD = at_M[:, None] * mean_MD.shape[1] + column_D[None, :]
    tl.store(mean_SMD + at_MD, mean_MD, (row_M < ROWS)[:, None])
    tl.store(lse_SM + at_M, lse_M, row_M < ROWS)


@triton.jit
def merge(
    mean_SMD, lse_SM, count, ROWS: tl.constexpr, DIM: tl.constexpr, R: tl.constexpr, S: tl.constexpr
) -> tl.tensor:
    """Return the mean and the log-sum-exp of `count` parts, S at a time, always in this order.

    Args:
        mean_SMD: Where the parts' means begin, ROWS rows each, of which a tile holds R.
        lse_SM: Where their log-sum-exps begin.
        count: How many parts there are.
        ROWS: Rows of a part.
        DIM: Columns.
        R: Rows of the tile, a power of two.
        S: Parts that are read together.
    """
    row_R, column_D = tl.arange(0, R), tl.arange(0, DIM)
    largest_R = tl.full([R], float("-inf"), tl.float32)
    total_R = tl.zeros([R], tl.float32)
    sum_RD = tl.zeros([R, DIM], tl.float32)
    for first in range(0, count, S):
        part_S = tl.arange(0, S) + first
        # Rows come first, so warps divide them, and each sums its own splits.
        at_RS = part_S[None, :] * ROWS + row_R[:, None]
        is_there_RS = (part_S < count)[None, :] & (row_R < ROWS)[:, None]
        # Written by other CTAs: bypasses L1.
        lse_RS = tl.load(lse_SM + at_RS, is_there_RS, other=float("-inf"), cache_modifier=".cg")
        at_RSD = at_RS[:, :, None] * DIM + column_D[None, None, :]
        mean_RSD = tl.load(
            mean_SMD + at_RSD, is_there_RS[:, :, None], other=0.0, cache_modifier=".cg"
        )
        larger_R = tl.maximum(largest_R, tl.max(lse_RS, axis=1))
        shift_R = shift_of(larger_R)
        shrink_R = tl.exp2(largest_R - shift_R)
        weight_RS = tl.exp2(lse_RS - shift_R[:, None])
        total_R = total_R * shrink_R + tl.sum(weight_RS, axis=1)
        sum_RD = sum_RD * shrink_R[:, None] + tl.sum(mean_RSD * weight_RS[:, :, None], axis=1)
        largest_R = larger_R
    return finish(sum_RD, largest_R, total_R)


@triton.jit
def raise_max(top_M, largest_M, scale) -> tl.tensor:
    """Return the factor for sums so far, and the row maxima with `top_M`, those of this tile.

    Scores are unscaled; the scale is above 0.
    """
    larger_M = tl.maximum(largest_M, top_M)
    # Exactly 1 where no score was larger.
    return tl.exp2((largest_M - shift_of(larger_M)) * scale), larger_M


@triton.jit
def weigh_scores(score_MN, largest_M, scale, RAISE: tl.constexpr = 0) -> tl.tensor:
    """Return the weights of unscaled scores with known row maxima, times 2 ** RAISE.

    Scaling and subtracting are one FMA. `partial_sums` sums the weights.
    """
    return tl.exp2(tl.fma(score_MN, scale, (RAISE - shift_of(largest_M) * scale)[:, None]))


@triton.jit
def settle(total_M, largest_M, scale, DTYPE: tl.constexpr) -> tl.tensor:
    """Return the totals of weights, corrected for the rounding of each row's largest weight.

    That weight is rounded to 16 bits for the GEMM, but not in the total. Where scores are in the
    thousands it is not exactly 1. With the correction, a query that sees little but one key has
    that key's value to the last bit, and a gradient of 0 instead of a rounding error times scores.
    """
    weight_M = tl.exp2(tl.fma(largest_M, scale, -shift_of(largest_M) * scale))
    return total_M + (weight_M.to(DTYPE).to(tl.float32) - weight_M)


@triton.jit
def row_max(score_MN) -> tl.tensor:
    """Return the largest of each row; pairs first, which are independent."""
    M: tl.constexpr = score_MN.shape[0]
    N: tl.constexpr = score_MN.shape[1]
    low_MN, high_MN = tl.split(score_MN.reshape([M, N // 2, 2]))
    return tl.max(tl.maximum(low_MN, high_MN), axis=1)


@triton.jit
def partial_sums(weight_MN) -> tl.tensor:
    """Return the sum of each row in four parts, one for each thread, without an exchange."""
    M: tl.constexpr = weight_MN.shape[0]
    N: tl.constexpr = weight_MN.shape[1]
    return tl.sum(tl.sum(weight_MN.reshape([M, N // 8, 4, 2]), axis=3), axis=1)
