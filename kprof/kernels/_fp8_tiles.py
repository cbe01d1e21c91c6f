"""Products of tiles with FP8 weights on the device: K whole, or in parts that are put together.

M, N and K as in `_fp8_device`; weights are the left operand here, too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kprof.kernels._fp8_device import SIDE, finish
from kprof.kernels._fp8_overlap import fetch_and_wait
from kprof.kernels._tile_splits import is_last_to_arrive, part_length

# So many products of 8 bits are summed in tensor cores.
MOST_IMPRECISE = tl.constexpr(128)


@triton.jit
def _put_together(sum_NM, parts, counter, part, SPLITS: tl.constexpr) -> tuple[tl.tensor, bool]:
    """Return the sum of a tile's parts, and whether it is this program that has it: the last."""
    is_mine = True
    if SPLITS > 1:
        N: tl.constexpr = sum_NM.shape[0]
        M: tl.constexpr = sum_NM.shape[1]
        at_NM = tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
        tl.store(parts + part * (N * M) + at_NM, sum_NM)
        is_mine = is_last_to_arrive(counter, SPLITS)
        if is_mine:
            sum_NM = tl.zeros([N, M], tl.float32)
            for other in tl.range(SPLITS):
                sum_NM += tl.load(parts + other * (N * M) + at_NM)
    return sum_NM, is_mine


@triton.jit
def _place_of(tile, num_rows, num_columns, M: tl.constexpr, N: tl.constexpr) -> tl.tensor:
    """Return which rows and columns a tile has: neighbours in time share what they read."""
    strips, tiles_n = tl.cdiv(num_rows, M), tl.cdiv(num_columns, N)
    # Of columns of tiles that are worked off together.
    TOGETHER: tl.constexpr = 8
    band = tile // (TOGETHER * strips)
    width = tl.minimum(tiles_n - band * TOGETHER, TOGETHER)
    within = tile - band * TOGETHER * strips
    return within // width, band * TOGETHER + within % width


@triton.jit(do_not_specialize=["num_rows", "x_scale_step"])
def tiled(
    x_MK,
    w_NK,
    y_MN,
    x_scale,
    w_scale,
    bias_N,
    partial,
    counter,
    num_rows,
    num_columns,
    depth,
    x_step: tl.int64,
    x_scale_step: tl.int64,
    HAS_X_SCALE: tl.constexpr,
    IS_BLOCKED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
    FETCHED: tl.constexpr,
) -> None:
    """Multiply M rows of x by N of the weights over one of SPLITS parts of K; the last adds up."""
    tile, part = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    strip, band = _place_of(tile, num_rows, num_columns, M, N)
    m_M, n_N = strip * M + tl.arange(0, M), band * N + tl.arange(0, N)
    each = part_length(depth, SPLITS, K, K)
    first = part * each
    end = tl.minimum(first + each, depth)
    w_at = w_NK + tl.minimum(n_N, num_columns - 1)[:, None].to(tl.int64) * depth
    x_at = x_MK + m_M[:, None].to(tl.int64) * x_step
    is_m_M = m_M < num_rows
    if OVERLAPS:
        fetch_and_wait(w_NK, band * N, num_columns, depth, first, end, N, FETCHED)
    sum_NM = tl.zeros([N, M], tl.float32)
    for start in tl.range(first, end, K, num_stages=STAGES):
        k_K = start + tl.arange(0, K)
        if IS_EVEN:
            w = tl.load(w_at + k_K[None, :])
            x = tl.load(x_at + k_K[None, :], is_m_M[:, None], other=0.0)
        else:
            is_k_K = k_K < end
            w = tl.load(w_at + k_K[None, :], is_k_K[None, :], other=0.0)
            x = tl.load(x_at + k_K[None, :], is_m_M[:, None] & is_k_K[None, :], other=0.0)
        if IS_BLOCKED:
            tl.static_assert(K == SIDE and SIDE % N == 0)
            group = start // SIDE
            at = w_scale + (band * N // SIDE) * tl.cdiv(depth, SIDE) + group
            scale_M = tl.full([M], 1.0, tl.float32) * tl.load(at)
            if HAS_X_SCALE:
                scale_M *= tl.load(x_scale + group * x_scale_step + m_M, is_m_M, other=0.0)
            sum_NM += tl.dot(w.to(x.dtype), x.T) * scale_M[None, :]
        elif x.dtype == tl.float8e4nv:
            # Hopper's tensor cores sum such products in 14 bits: each step's go to sums in 32.
            tl.static_assert(K <= MOST_IMPRECISE)
            sum_NM += tl.dot(w, x.T)
        else:
            sum_NM = tl.dot(w.to(x.dtype), x.T, sum_NM)
    parts = partial + tile.to(tl.int64) * (SPLITS * N * M)
    sum_NM, is_mine = _put_together(sum_NM, parts, counter + tile, part, SPLITS)
    if is_mine:
        into = (y_MN, x_scale, w_scale, bias_N, num_rows, num_columns)
        finish(sum_NM, n_N, m_M, into, HAS_X_SCALE, IS_BLOCKED, ACTIVATION)
