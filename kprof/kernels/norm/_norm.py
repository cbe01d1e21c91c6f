"""RMSNorm and LayerNorm of rows, with or without a residual add: device code and torch operator.

M rows, N columns, P CTAs, K parameters (the weight, then the bias). A row is whole in registers
between the statistics and the product. In the backward pass CTAs walk over rows, and load the next
ones ahead.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, is_grad_enabled

from kprof.kernels import Work
from kprof.kernels.runtime import (
    DTYPES,
    Launcher,
    alignments,
    applied,
    count_rows,
    define,
    empty_like,
    is_widened,
    kind_of,
    next_power_of_two,
    num_sms,
    rows_of,
    tile_of,
)

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


FORMS = {"llama": LLAMA.value, "torch": TORCH.value, "gemma": GEMMA.value, "layer": LAYER.value}
LLAMA_FORM, LAYER_FORM = LLAMA.value, LAYER.value
# Beyond, a row and the sums of its gradients do not fit the registers of one program.
MOST_COLUMNS = {"llama": 16_384, "torch": 16_384, "gemma": 16_384, "layer": 8_192}
# Of a program; up to so many columns, so few warps that most sums stay within one. Where they do
# not, and many threads wait for the sum, the weight is loaded before it.
FORWARD_ELEMENTS, FEW_WARPS, FEW_COLUMNS = 2_048, 4, 4_096
# Backward, two programs of 8 warps fill an SM: rows loaded ahead hide waiting, and shares are few.
BACKWARD_ELEMENTS, BACKWARD_ELEMENTS_PER_SM = 4_096, 8_192
# Of an SM's shared memory, for the rows that are loaded ahead.
AHEAD_BYTES = 192 * 1024
TILE, BLOCK_OF_SUM, WARPS_OF_SUM = 256, 16, 8
# With a residual, of just so many columns (others would spill): leaves room for one that adds up.
FITTED_COLUMNS, FITTED_REGISTERS = 2_048, 112

_launch_forward = Launcher(forward)
_launch_backward = Launcher(backward)
_launch_sum = Launcher(add_up)


class BackwardPlan(NamedTuple):
    """How rows are shared out; it depends on the columns alone, so that rows do not change bits."""

    rows: int
    """Of a program, at a time."""
    block: int
    """Columns that a program sees: the next power of two."""
    warps: int
    stages: int
    """How far rows are loaded ahead."""
    programs_per_sm: int
    """They go on to other rows."""


@functools.cache
def plan_forward(columns: int) -> tuple[int, int, int]:
    """Return the rows of a program, the columns that it sees, and its warps."""
    rows, block, warps = tile_of(columns, FORWARD_ELEMENTS)
    return rows, block, warps if block > FEW_COLUMNS else min(warps, FEW_WARPS)


@functools.cache
def plan_backward(columns: int, row_bytes: int) -> BackwardPlan:
    """Return the plan for rows of so many bytes read, as long as what a program sees of them."""
    rows, block, warps = tile_of(columns, BACKWARD_ELEMENTS)
    programs = max(1, BACKWARD_ELEMENTS_PER_SM // (rows * block))
    ahead_bytes = programs * rows * row_bytes
    # 3 stages keep three rows of each program in shared memory, 2 stages up to one and a half.
    stages = 3 if 3 * ahead_bytes <= AHEAD_BYTES else 2 if 3 * ahead_bytes < 2 * AHEAD_BYTES else 1
    return BackwardPlan(rows, block, warps, stages, programs)


def norm(
    form: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, ...]:
    """Return the normalised rows of x (plus residual), and where there is one, that sum.

    Args:
        form: Of `FORMS`: where it rounds, and whether the mean is taken off.
        x: (..., N); float32, float16 or bfloat16.
        residual: As x.
        weight: (N,), of the same dtype or, with "llama", float32.
        bias: (N,), of the weight's dtype.
        eps: Added to the mean of squares.
    """
    if is_grad_enabled():
        for one in (x, residual, weight, bias):
            if one is not None and one.requires_grad:
                return _with_gradient(x, residual, weight, bias, float(eps), FORMS[form])
    return tuple(_forward(x, residual, weight, bias, float(eps), FORMS[form], False))


class _WithGradient(torch.autograd.Function):
    """The operator with its gradients, outside the dispatcher, where that costs least."""

    @staticmethod
    def forward(ctx: Any, x, residual, weight, bias, eps: float, form: int) -> tuple[Tensor, ...]:
        made = _forward(x, residual, weight, bias, eps, form, True)
        results, statistics = (made[:1], made[1:]) if residual is None else (made[:2], made[2:])
        # Those of LayerNorm are two.
        mean = statistics[1] if form == LAYER_FORM else None
        ctx.save_for_backward(x if residual is None else results[1], weight, statistics[0], mean)
        ctx.set_materialize_grads(False)
        ctx.form, ctx.has_bias, ctx.has_residual = form, bias is not None, residual is not None
        return tuple(results)

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor | None, dsum: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        if dy is None:
            # Only the sum was used.
            return dsum, dsum, None, None, None, None
        x, weight, rstd, mean = ctx.saved_tensors
        _, _, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        num_parameters = (1 + ctx.has_bias) * (wants_weight or wants_bias)
        dx, *dparameters = _backward(dy, dsum, x, weight, rstd, mean, ctx.form, num_parameters)
        dweight = dparameters[0] if num_parameters and weight is not None else None
        dbias = dparameters[1] if num_parameters > 1 else None
        return dx, dx if ctx.has_residual else None, dweight, dbias, None, None


_with_gradient = applied(_WithGradient)


def _empty_results(x, residual, weight, bias, eps, form, keeps) -> list[Tensor]:
    """Return y; with a residual, the sum; kept for gradients, rstd, and the mean in two parts."""
    if weight is not None and form == LLAMA_FORM and weight.dtype != x.dtype:
        results = [torch.empty(x.shape, dtype=torch.float32, device=x.device)]
    else:
        results = [empty_like(x)]
    if residual is not None:
        results.append(empty_like(x))
    if keeps:
        rows = x.shape[:-1]
        results.append(torch.empty(rows, dtype=torch.float32, device=x.device))
        if form == LAYER_FORM:
            results.append(torch.empty((2, *rows), dtype=torch.float32, device=x.device))
    return results


def _run_forward(x, residual, weight, bias, eps, form, keeps) -> tuple[Tensor, ...]:
    results = _empty_results(x, residual, weight, bias, eps, form, keeps)
    mean = rstd = None
    if keeps:
        rstd, mean = (results[-2], results[-1]) if form == LAYER_FORM else (results[-1], None)
    added = None if residual is None else results[1]
    tensors = (x, residual, weight, bias, results[0], added, mean, rstd)
    call = kind_of(x, residual, weight, bias), eps, form, keeps
    if not _launch_forward.again(call, tensors) and count_rows(x):
        _launch_first(call, tensors, eps, form)
    return tuple(results)


def _launch_first(call, tensors, eps, form) -> None:
    """Launch what was not launched for such tensors before."""
    x, residual, weight, bias, *results = tensors
    num_rows, columns = count_rows(x), x.shape[-1]
    rows, stride = rows_of(x)
    others, other_stride = (None, stride) if residual is None else rows_of(residual)
    weight, bias = _side_by_side(weight), _side_by_side(bias)
    rows_each, block, warps = plan_forward(columns)
    key = (
        *(x.device, x.dtype, columns, form, results[-1] is None, residual is None, bias is None),
        None if weight is None else weight.dtype,
        alignments((rows, others, weight, bias), stride, other_stride),
    )
    arguments = (
        *(rows, others, weight, bias, *results, stride, other_stride, num_rows, eps),
        *(form, columns, rows_each, block, block > FEW_COLUMNS),
    )
    programs, options = -(-num_rows // rows_each), {"num_warps": warps}
    _launch_forward(key, programs, arguments, options, call=call, tensors=tensors)


def _empty_gradients(dy, dsum, x, weight, rstd, mean, form, num_parameters) -> list[Tensor]:
    """Return the gradients of x (and of the residual), and of the weight and the bias."""
    gradients = [empty_like(x)]
    for _ in range(num_parameters):
        # A bias may come without a weight.
        gradients.append(x.new_empty(x.shape[-1:]) if weight is None else empty_like(weight))
    return gradients


def _run_backward(dy, dsum, x, weight, rstd, mean, form, num_parameters) -> list[Tensor]:
    dx, *dparameters = _empty_gradients(dy, dsum, x, weight, rstd, mean, form, num_parameters)
    num_rows, columns = count_rows(x), x.shape[-1]
    if not num_rows:
        return [dx, *(one.zero_() for one in dparameters)]
    element_bytes = x.element_size() * (1 + (dsum is not None)) + dy.element_size()
    plan = plan_backward(columns, next_power_of_two(columns) * element_bytes)
    programs = _share_out(-(-num_rows // plan.rows), plan.programs_per_sm * num_sms(x.device))
    shares = None
    if num_parameters:
        shape = (num_parameters, programs, columns)
        shares = torch.empty(shape, dtype=torch.float32, device=x.device)
    tensors = (dy, dsum, x, weight, mean, rstd, dx, shares)
    call = kind_of(*tensors[:6]), form, num_parameters
    if not _launch_backward.again(call, tensors):
        _launch_backward_first(call, tensors, form, num_parameters, plan, programs)
    if num_parameters:
        _add_up(shares, *dparameters)
    return [dx, *dparameters]


def _launch_backward_first(call, tensors, form, num_parameters, plan, programs) -> None:
    """Launch what was not launched for such tensors before."""
    dy, dsum, x, weight, *others = tensors
    num_rows, columns = count_rows(x), x.shape[-1]
    (rows, stride), (dys, dy_stride), weight = rows_of(x), rows_of(dy), _side_by_side(weight)
    dsums, dsum_stride = (None, dy_stride) if dsum is None else rows_of(dsum)
    key = (
        *(x.device, x.dtype, dy.dtype, columns, form, num_parameters, dsum is None),
        None if weight is None else weight.dtype,
        alignments((rows, dys, dsums, weight, *others[:2]), stride, dy_stride, dsum_stride),
    )
    arguments = (
        *(dys, dsums, rows, weight, *others, dy_stride, dsum_stride, stride, num_rows),
        *(form, num_parameters, columns, plan.rows, plan.block, plan.stages),
        num_parameters > 0 and _overlaps(x.device),
    )
    options = {"num_warps": plan.warps}
    if dsum is not None and columns == FITTED_COLUMNS:
        options["maxnreg"] = FITTED_REGISTERS
    _launch_backward(key, programs, arguments, options, call=call, tensors=tensors)


def _add_up(shares: Tensor, dweight: Tensor, dbias: Tensor | None = None) -> None:
    tensors, call = (shares, dweight, dbias), (shares.shape, dweight.dtype, shares.device)
    if _launch_sum.again(call, tensors):
        return
    num_parameters, programs, columns = shares.shape
    key = shares.device, dweight.dtype, columns, num_parameters
    overlaps = _overlaps(shares.device)
    arguments = (*tensors, programs, columns, TILE, BLOCK_OF_SUM, overlaps)
    grid = num_parameters * -(-columns // BLOCK_OF_SUM)
    options = {"num_warps": WARPS_OF_SUM, **({"launch_pdl": True} if overlaps else {})}
    _launch_sum(key, grid, arguments, options, call=call, tensors=tensors)


@functools.cache
def _overlaps(device: torch.device) -> bool:
    """Tell whether a launch may begin before the one that it depends on has ended: from Hopper."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _share_out(tiles: int, most: int) -> int:
    """Return how many programs walk over so many tiles; fewer where no more would end sooner."""
    programs = min(tiles, most)
    return -(-tiles // -(-tiles // programs))


def _side_by_side(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.contiguous()


_forward = define(
    "norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, int form,"
    " bool keeps) -> Tensor[]",
    _run_forward,
    _empty_results,
)
_backward = define(
    "norm_backward(Tensor dy, Tensor? dsum, Tensor x, Tensor? weight, Tensor rstd,"
    " Tensor? mean, int form, int num_parameters) -> Tensor[]",
    _run_backward,
    _empty_gradients,
)


def why_not(form: str, x: Tensor, *parameters: Tensor | None) -> str | None:
    """Return why rows of x, or these weights and biases, are not taken."""
    if x.dtype not in DTYPES:
        return f"{x.dtype} is none of float32, float16 and bfloat16"
    if form in ("torch", "layer") and is_widened(x):
        return "autocast is on, and makes this float32"
    if x.dim() == 0 or x.shape[-1] > MOST_COLUMNS[form]:
        return f"rows of {tuple(x.shape)[-1:]} columns: at most {MOST_COLUMNS[form]:,} fit"
    for one in parameters:
        if one is not None and one.shape != x.shape[-1:]:
            return f"a weight or bias of shape {tuple(one.shape)} for rows of {x.shape[-1]} columns"
        if one is not None and one.dtype not in (x.dtype, *([] if form == "layer" else DTYPES[:1])):
            return f"the weight or bias is {one.dtype}, the input {x.dtype}"
    return None


def work_of(rows: int, flops: int, x: Tensor, *parameters: Tensor | None) -> Work:
    """Count so many tensors like x, and the parameters once; FLOPs are those of an element."""
    once = sum(one.numel() * one.element_size() for one in parameters if one is not None)
    return Work(flops * x.numel(), rows * x.numel() * x.element_size() + once)
