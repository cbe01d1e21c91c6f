"""What becomes of a part: a result, or one of several that the last program puts together."""

from __future__ import annotations

import triton
import triton.language as tl

from kprof.kernels._tile_softmax import merge, store_part
from kprof.kernels._tile_splits import is_last_to_arrive


@triton.jit
def _row_of(row, TOKENS: tl.constexpr, GROUP: tl.constexpr) -> tl.tensor:
    """Return which row of the results, (B, T, H), a row of this program's tile is."""
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    batch = tl.program_id(2).to(tl.int64)
    return (batch * TOKENS + row % TOKENS) * num_heads * GROUP + head * GROUP + row // TOKENS


@triton.jit
def store(
    mean_MD, lse_M, y_BTHD, lse_BHT, place, TOKENS: tl.constexpr, GROUP: tl.constexpr
) -> None:
    """Store the results of one head of keys; the log-sum-exp becomes the natural one."""
    row_M, column_D = tl.arange(0, mean_MD.shape[0]), tl.arange(0, mean_MD.shape[1])
    at_M = _row_of(row_M, TOKENS, GROUP) * mean_MD.shape[1]
    is_row_M = row_M < TOKENS * GROUP
    mean_MD = mean_MD.to(y_BTHD.dtype.element_ty)
    tl.store(y_BTHD + (at_M[:, None] + column_D[None, :]), mean_MD, is_row_M[:, None])
    tl.store(lse_BHT + place * TOKENS * GROUP + row_M, lse_M * 0.6931471805599453, is_row_M)


@triton.jit
def merge_as_last(
    mean_MD,
    lse_M,
    y_BTHD,
    lse_BHT,
    partial,
    counter,
    place,
    count,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
) -> None:
    """Leave a part in memory; the last program to do so puts all of them together."""
    ROWS: tl.constexpr = TOKENS * GROUP
    DIM: tl.constexpr = mean_MD.shape[1]
    num_parts = tl.num_programs(0)
    means = partial + place * num_parts * (ROWS * DIM)
    # Behind all means.
    num_places = tl.num_programs(1).to(tl.int64) * tl.num_programs(2)
    lses = partial + (num_places * DIM + place) * num_parts * ROWS
    store_part(mean_MD, lse_M, means, lses, tl.program_id(0), ROWS)
    if is_last_to_arrive(counter + place, count):
        mean_RD, lse_R = merge(means, lses, count, ROWS, DIM, R, S)
        store(mean_RD, lse_R, y_BTHD, lse_BHT, place, TOKENS, GROUP)
