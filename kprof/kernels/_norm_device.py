"""What runs on the GPU for all norms of rows: RMSNorm and LayerNorm, with or without a sum first.

M rows, N columns, P programs, K parameters (the weight, then the bias). A row is whole in registers
between the statistics and the product. In the backward pass programs walk over rows, and load the
next ones ahead.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Hugging Face's Llama rounds before the weight, torch and OLMo after it; Gemma's weight lacks its
# one; LAYER takes off the mean first, and rounds last.
LLAMA: tl.constexpr = tl.constexpr(0)
TORCH: tl.constexpr = tl.constexpr(1)
GEMMA: tl.constexpr = tl.constexpr(2)
LAYER: tl.constexpr = tl.constexpr(3)


@triton.jit(do_not_specialize=["num_rows"])
def forward(
    x_MN,
    residual_MN,
    weight_N,
    bias_N,
    y_MN,
    sum_MN,
    mean_2M,
    rstd_M,
    x_stride: tl.int64,
    residual_stride: tl.int64,
    num_rows,
    eps,
    FORM: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_WEIGHT_EARLY: tl.constexpr,
):
    """Normalise rows; where there is a residual, after adding it."""
    columns = tl.arange(0, BLOCK)[None, :]
    rows = tl.arange(0, ROWS).to(tl.int64) + tl.program_id(0) * ROWS
    is_row, is_column = rows < num_rows, columns < COLUMNS
    mask = is_row[:, None] & is_column
    x = tl.load(x_MN + rows[:, None] * x_stride + columns, mask, other=0.0)
    if residual_MN is not None:
        residual = tl.load(residual_MN + rows[:, None] * residual_stride + columns, mask, other=0.0)
        x = (residual.to(tl.float32) + x.to(tl.float32)).to(x.dtype)
        tl.store(sum_MN + rows[:, None] * COLUMNS + columns, x, mask)
    if IS_WEIGHT_EARLY and weight_N is not None:
        weight = tl.load(weight_N + columns, is_column, other=0.0)
    y = x.to(tl.float32)
    if FORM == LAYER:
        y = _centred(y, mean_2M, rows, num_rows, is_column, COLUMNS)
    rstd = tl.rsqrt(tl.sum(y * y, axis=1) * (1.0 / COLUMNS) + eps)
    if rstd_M is not None:
        tl.store(rstd_M + rows, rstd, is_row)
    y = _rounded(y * rstd[:, None], x.dtype, FORM)
    if weight_N is not None:
        if not IS_WEIGHT_EARLY:
            weight = tl.load(weight_N + columns, is_column, other=0.0)
        y *= _factor(weight, FORM)
    if bias_N is not None:
        y += tl.load(bias_N + columns, is_column, other=0.0).to(tl.float32)
    y = y.to(y_MN.dtype.element_ty)
    tl.store(y_MN + rows[:, None] * COLUMNS + columns, y, mask)


@triton.jit
def _centred(y, mean_2M, rows, num_rows, is_column, COLUMNS: tl.constexpr):
    """Take the mean off, and keep it."""
    centre = tl.sum(y, axis=1) * (1.0 / COLUMNS)
    # What rounding left of a large mean is not little: it is taken off, and kept, too.
    rest = tl.sum(tl.where(is_column, y - centre[:, None], 0.0), axis=1) * (1.0 / COLUMNS)
    if mean_2M is not None:
        tl.store(mean_2M + rows, centre, rows < num_rows)
        tl.store(mean_2M + num_rows + rows, rest, rows < num_rows)
    return tl.where(is_column, y - centre[:, None] - rest[:, None], 0.0)


@triton.jit(do_not_specialize=["num_rows"])
def backward(
    dy_MN,
    dsum_MN,
    x_MN,
    weight_N,
    mean_2M,
    rstd_M,
    dx_MN,
    dparameters_KPN,
    dy_stride: tl.int64,
    dsum_stride: tl.int64,
    x_stride: tl.int64,
    num_rows,
    FORM: tl.constexpr,
    PARAMETERS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Return gradients for rows, and each program's share of those of weight and bias."""
    _let_in(OVERLAPS)
    columns = tl.arange(0, BLOCK)[None, :]
    is_column = columns < COLUMNS
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)
    dbias = tl.zeros((ROWS, BLOCK), tl.float32)
    first, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    for row in tl.range(first, num_rows, step, num_stages=STAGES):
        rows = tl.arange(0, ROWS).to(tl.int64) + row
        is_row = rows < num_rows
        mask = is_row[:, None] & is_column
        dy = tl.load(dy_MN + rows[:, None] * dy_stride + columns, mask, other=0.0).to(tl.float32)
        normed = tl.load(x_MN + rows[:, None] * x_stride + columns, mask, other=0.0)
        normed = normed.to(tl.float32)
        rstd = tl.load(rstd_M + rows, is_row, other=0.0)[:, None]
        if FORM == LAYER:
            normed -= tl.load(mean_2M + rows, is_row, other=0.0)[:, None]
            normed -= tl.load(mean_2M + num_rows + rows, is_row, other=0.0)[:, None]
        normed *= rstd
        dnormed = dy
        if weight_N is not None:
            # Loaded where it is used: it comes from a cache, and registers are what is short.
            weight = tl.load(weight_N + columns, is_column, other=0.0)
            dnormed *= _factor(weight, FORM)
        # Without a parameter nobody stores these: the compiler leaves them out.
        dweight += dy * normed
        dbias += dy
        dx = dnormed - normed * (tl.sum(dnormed * normed, axis=1) * (1.0 / COLUMNS))[:, None]
        if FORM == LAYER:
            dx -= (tl.sum(dnormed, axis=1) * (1.0 / COLUMNS))[:, None]
        dx *= rstd
        if dsum_MN is not None:
            dx += tl.load(dsum_MN + rows[:, None] * dsum_stride + columns, mask, other=0.0)
        dx = dx.to(dx_MN.dtype.element_ty)
        tl.store(dx_MN + rows[:, None] * COLUMNS + columns, dx, mask)
    if PARAMETERS > 0:
        shares = dparameters_KPN + tl.program_id(0).to(tl.int64) * COLUMNS + columns
        _store_sum(shares, dweight, is_column)
        if PARAMETERS > 1:
            _store_sum(shares + tl.num_programs(0).to(tl.int64) * COLUMNS, dbias, is_column)


@triton.jit
def _let_in(OVERLAPS: tl.constexpr):
    """Let programs of the next launch come, and wait, as soon as there is room for them."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _store_sum(places, values, is_column):
    tl.store(places, tl.sum(values, axis=0)[None, :], is_column)


@triton.jit
def _rounded(y, dtype: tl.constexpr, FORM: tl.constexpr):
    return y.to(dtype).to(tl.float32) if FORM == LLAMA else y


@triton.jit
def _factor(weight, FORM: tl.constexpr):
    weight = weight.to(tl.float32)
    return weight + 1.0 if FORM == GEMMA else weight


@triton.jit(do_not_specialize=["num_programs"])
def add_up(
    partial_KPN,
    dweight_N,
    dbias_N,
    num_programs,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Add the shares of all programs, in their order."""
    if OVERLAPS:
        # They came before the programs that store the shares had ended.
        tl.extra.cuda.gdc_wait()
    blocks: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    parameter = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < COLUMNS
    total = tl.zeros((TILE, BLOCK), tl.float32)
    for first in range(0, num_programs, TILE):
        programs = tl.arange(0, TILE) + first
        places = (parameter * num_programs + programs)[:, None] * COLUMNS + columns[None, :]
        mask = (programs < num_programs)[:, None] & is_column[None, :]
        total += tl.load(partial_KPN + places, mask, other=0.0)
    summed = tl.sum(total, axis=0).to(dweight_N.dtype.element_ty)
    if parameter == 0:
        tl.store(dweight_N + columns, summed, is_column)
    elif dbias_N is not None:
        tl.store(dbias_N + columns, summed, is_column)
