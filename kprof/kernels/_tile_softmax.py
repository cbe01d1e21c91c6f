"""Online softmax over tiles of keys, in registers: its state, one step, its end, and merging.

Powers are of 2, so scores come multiplied by log2(e). A row's state is the largest score so far,
the sum of powers, and the sum of values weighted by them. A row that saw nothing but -inf has the
result 0 and the log-sum-exp -inf.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def shift_of(largest) -> tl.tensor:
    """Return what scores are reduced by: -inf less itself would be no number."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def weigh(score_MN, largest_M, total_MN) -> tl.tensor:
    """Take a tile's scores in: return its weights, how sums so far shrink, and the new state.

    The total is kept for each column of the tile, and added up across them at the end: adding
    across columns takes warps, which would wait for one another in every step.
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
    # Where the weights are 0, NaN among the values made the sum NaN.
    mean_MD = tl.where(is_empty[:, None], 0.0, sum_MD / total_M[:, None])
    return mean_MD, tl.where(is_empty, float("-inf"), largest_M + tl.log2(total_M))


@triton.jit
def store_part(mean_MD, lse_M, mean_SMD, lse_SM, part, ROWS: tl.constexpr) -> None:
    """Store the first ROWS rows of a part's mean and log-sum-exp where `merge` looks for them."""
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
        # Rows come first, so that warps share them out: then each adds up its own parts.
        at_RS = part_S[None, :] * ROWS + row_R[:, None]
        is_there_RS = (part_S < count)[None, :] & (row_R < ROWS)[:, None]
        # Others wrote these; what this SM holds of them in L1 would be older.
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
