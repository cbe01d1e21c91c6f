"""What goes before and behind attention's gradients on Hopper: numbers of each query, and rounding.

B, H, T and D as in `_attention_device`; M rows of a program.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_queries", "step"])
def prepare(
    y_BHTD,
    dy_BHTD,
    lse_BHT,
    dlse_BHT,
    numbers_BHTS,
    y_batch: tl.int64,
    y_head: tl.int64,
    y_token: tl.int64,
    dy_batch: tl.int64,
    dy_head: tl.int64,
    dy_token: tl.int64,
    num_queries,
    step,
    D: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store what a query's scores, and their gradients, begin with; behind the last query 0.

    That is its log-sum-exp in powers of 2, and its share of the gradients, both to be taken off.
    """
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row_M, column_D = tl.arange(0, M) + tl.program_id(0) * M, tl.arange(0, D)
    is_row_M = row_M < num_queries
    token_M = row_M.to(tl.int64)
    y_at = y_BHTD + batch * y_batch + head * y_head
    dy_at = dy_BHTD + batch * dy_batch + head * dy_head
    y_at += (token_M * y_token)[:, None] + column_D[None, :]
    dy_at += (token_M * dy_token)[:, None] + column_D[None, :]
    y_MD = tl.load(y_at, is_row_M[:, None], other=0.0).to(tl.float32)
    dy_MD = tl.load(dy_at, is_row_M[:, None], other=0.0).to(tl.float32)
    share_M = tl.sum(y_MD * dy_MD, axis=1)
    place = batch * tl.num_programs(1) + head
    from_M = place * num_queries + row_M
    if dlse_BHT is not None:
        share_M -= tl.load(dlse_BHT + from_M, is_row_M, other=0.0)
    lse_M = tl.load(lse_BHT + from_M, is_row_M, other=0.0)
    # Who sees nothing gives nothing, even where its log-sum-exp gets no number.
    share_M = tl.where(lse_M == float("-inf"), 0.0, share_M)
    # Of each block the one, then the other.
    to_M = numbers_BHTS + place * 2 * step + (row_M // BLOCK * 2 * BLOCK + row_M % BLOCK)
    is_place_M = row_M < step
    tl.store(to_M, lse_M * -LOG2_E, is_place_M)
    tl.store(to_M + BLOCK, -share_M, is_place_M)


@triton.jit(do_not_specialize=["num_queries"])
def round_sums(
    sums_BHTD,
    dq_BHTD,
    dq_batch: tl.int64,
    dq_head: tl.int64,
    dq_token: tl.int64,
    scale,
    num_queries,
    D: tl.constexpr,
    M: tl.constexpr,
) -> None:
    """Store sums times a scale, columns in their order, where sums have them as they were added."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row_M, column_D = tl.arange(0, M) + tl.program_id(0) * M, tl.arange(0, D)
    is_row_MD = (row_M < num_queries)[:, None]
    token_M = row_M.to(tl.int64)
    # Bits 4 3 2 1 0 of a column lie in the order 2 4 3 1 0.
    bit_2, bits_34 = column_D >> 2 & 1, column_D >> 3 & 3
    place_D = (column_D & -32) + bit_2 * 16 + bits_34 * 4 + (column_D & 3)
    place_D = tl.max_contiguous(tl.multiple_of(place_D, 4), 4)
    sums_at = sums_BHTD + ((batch * tl.num_programs(1) + head) * num_queries + token_M)[:, None] * D
    sum_MD = tl.load(sums_at + place_D[None, :], is_row_MD, other=0.0)
    dq_at = dq_BHTD + batch * dq_batch + head * dq_head + (token_M * dq_token)[:, None]
    tl.store(dq_at + column_D[None, :], (sum_MD * scale).to(dq_BHTD.dtype.element_ty), is_row_MD)
