"""GEMMs with FP8 weights on the device: for few rows, and by tiles with K whole or split.

M rows of x, N columns of the result, which are rows of the weights, K the summed dimension. Weights
are the left operand, so that a tile of them is filled however few the rows of x are.

With programmatic dependent launch, a GEMM begins as the cast of x ahead of it begins (`let_in`). It
fetches weights into L2, which is no read, and waits until the cast and all that ran before it have
ended; only then does it read or write.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from kprof.kernels.tiles.splits import is_last_to_arrive, part_length


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Tell whether a launch may begin before the one that it depends on has ended: from Hopper."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


# Of each row of weights that a program reads, in bytes; a power of two.
FETCHED = 512
# Of all programs: fetching more takes longer than the cast, and what is read first waits for it.
MOST_FETCHED = 6 << 20


def gains(programs: int, num_casting: int, fit: int, sms: int) -> bool:
    """Tell whether a product gains by being launched before the cast ends, as seen on an H200.

    Its programs go where there is most room: to other multiprocessors than the cast's. Where these
    have room for more than an even share, they get more and end last, by more than is gained.

    Args:
        programs: Of the product.
        num_casting: Programs of the cast.
        fit: Programs of the product that one multiprocessor has room for.
        sms: Multiprocessors of the GPU.
    """
    evenly, besides = -(-programs // sms), -(-programs // max(1, sms - num_casting))
    return min(besides, fit) <= evenly


@triton.jit
def let_in(OVERLAPS: tl.constexpr):
    """Let programs of the next launch come, and wait, as soon as there is room for them."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


# What DRAM is read by where nothing else is asked for.
LINE = tl.constexpr(64)


@triton.jit
def fetch_and_wait(w_NK, row, num_rows, depth, first, end, N: tl.constexpr, FETCHED: tl.constexpr):
    """Fetch N rows' weights from `first` into L2, FETCHED of each at most, then wait for the cast.

    FETCHED is a power of two, or 0.
    """
    if FETCHED > 0:
        rows = tl.minimum(row + tl.arange(0, N), num_rows - 1).to(tl.int64)
        k_L = first + tl.arange(0, FETCHED // LINE) * LINE
        _fetch(w_NK + rows[:, None] * depth + tl.minimum(k_L, end - 1)[None, :])
    tl.extra.cuda.gdc_wait()


@triton.jit
def _fetch(at):
    """Ask for what lies there to be brought to L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


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
