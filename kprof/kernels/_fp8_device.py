"""Products of few rows with FP8 weights on the device, and the end of all products with them.

M rows of x, N columns of the result, which are rows of the weights, K what is summed over. Weights
are the left operand, so that a tile of them is filled however few the rows of x are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kprof.kernels._fp8_overlap import fetch_and_wait

SIDE = tl.constexpr(128)


@triton.jit
def _activated(y, ACTIVATION: tl.constexpr) -> tl.tensor:
    if ACTIVATION == "relu":
        y = tl.where(y <= 0, 0.0, y)
    elif ACTIVATION == "silu":
        y = y / (1.0 + tl.exp(-y))
    elif ACTIVATION == "gelu":
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "none")
    return y


@triton.jit
def finish(
    sum_NM,
    n_N,
    m_M,
    into,
    HAS_X_SCALE: tl.constexpr,
    IS_BLOCKED: tl.constexpr,
    ACTIVATION: tl.constexpr,
) -> None:
    """Store what the sums become: scaled where whole rows share a scale, biased, activated.

    `into` holds the result, the scales of x and of the weights, the bias, and the result's size.
    """
    y_MN, x_scale, w_scale, bias_N, num_rows, num_columns = into
    is_n_N, is_m_M = n_N < num_columns, m_M < num_rows
    if not IS_BLOCKED:
        sum_NM *= tl.load(w_scale + n_N, is_n_N, other=0.0)[:, None]
        if HAS_X_SCALE:
            sum_NM *= tl.load(x_scale + m_M, is_m_M, other=0.0)[None, :]
    if bias_N is not None:
        sum_NM += tl.load(bias_N + n_N, is_n_N, other=0.0).to(tl.float32)[:, None]
    y = _activated(sum_NM.T, ACTIVATION).to(y_MN.dtype.element_ty)
    at_MN = m_M[:, None].to(tl.int64) * num_columns + n_N[None, :]
    tl.store(y_MN + at_MN, y, is_m_M[:, None] & is_n_N[None, :])


@triton.jit(do_not_specialize=["num_rows", "x_scale_step"])
def narrow(
    x_MK,
    w_NK,
    y_MN,
    x_scale,
    w_scale,
    bias_N,
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
    W: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
    FETCHED: tl.constexpr,
) -> None:
    """Multiply few rows of x by N rows of the weights; each of W warps sums a part of K.

    x in 16 bits meets weights that are widened to it. Nothing is left to put together with other
    programs, so that the time is that of reading.
    """
    m_M, n_N = tl.arange(0, M), tl.program_id(0) * N + tl.arange(0, N)
    part_W = tl.arange(0, W) * K
    k_WK = part_W[:, None] + tl.arange(0, K)[None, :]
    row_N = tl.minimum(n_N, num_columns - 1).to(tl.int64)
    w_at = w_NK + row_N[None, :, None] * depth + k_WK[:, None, :]
    x_at = x_MK + m_M[None, None, :].to(tl.int64) * x_step + k_WK[:, :, None]
    is_m_M = m_M < num_rows
    if OVERLAPS:
        fetch_and_wait(w_NK, tl.program_id(0) * N, num_columns, depth, 0, depth, N, FETCHED)
    sum_WNM = tl.zeros([W, N, M], tl.float32)
    for start in tl.range(0, depth, W * K, num_stages=STAGES):
        if IS_EVEN:
            w = tl.load(w_at + start)
            x = tl.load(x_at + start, is_m_M[None, None, :], other=0.0)
        else:
            is_k = k_WK < depth - start
            w = tl.load(w_at + start, is_k[:, None, :], other=0.0)
            x = tl.load(x_at + start, is_k[:, :, None] & is_m_M[None, None, :], other=0.0)
        if IS_BLOCKED:
            group_W = (start + part_W) // SIDE
            is_group_W = start + part_W < depth
            groups = tl.cdiv(depth, SIDE)
            w_at_W = w_scale + (tl.program_id(0) * N // SIDE) * groups + group_W
            scale_WM = tl.load(w_at_W, is_group_W, other=0.0)[:, None]
            if HAS_X_SCALE:
                at_WM = group_W[:, None].to(tl.int64) * x_scale_step + m_M[None, :]
                is_WM = is_group_W[:, None] & is_m_M[None, :]
                scale_WM *= tl.load(x_scale + at_WM, is_WM, other=0.0)
            sum_WNM += tl.dot(w.to(x.dtype), x) * scale_WM[:, None, :]
        else:
            sum_WNM = tl.dot(w.to(x.dtype), x, sum_WNM)
    sum_NM = tl.sum(sum_WNM, axis=0)
    into = (y_MN, x_scale, w_scale, bias_N, num_rows, num_columns)
    finish(sum_NM, n_N, m_M, into, HAS_X_SCALE, IS_BLOCKED, ACTIVATION)
