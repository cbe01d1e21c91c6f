"""All norms of rows as one operator of torch, with its gradients."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kprof.kernels import Work
from kprof.kernels._launch import Launcher, alignments
from kprof.kernels._norm_device import GEMMA, LAYER, LLAMA, TORCH, add_up, backward, forward
from kprof.kernels._operator import define
from kprof.kernels._rows import (
    DTYPES,
    MOST_WARPS,
    count_rows,
    empty_like,
    is_widened,
    num_sms,
    rows_of,
    tile_of,
)

FORMS = {"llama": LLAMA.value, "torch": TORCH.value, "gemma": GEMMA.value, "layer": LAYER.value}
# Beyond, a row and the sums of its gradients do not fit the registers of one program.
MOST_COLUMNS = {"llama": 16_384, "torch": 16_384, "gemma": 16_384, "layer": 8_192}
FORWARD_ELEMENTS, BACKWARD_ELEMENTS = 4_096, 2_048
# Threads of an SM in the backward pass, as many as its registers allow: enough to hide what is
# not hidden by loading rows ahead, and few programs, whose shares have to be added up.
BACKWARD_THREADS = 1_024
# Rows so long that one program has the SM for itself.
WHOLE_SM = 8_192
# Of an SM's shared memory, for the rows that are loaded ahead.
AHEAD_BYTES = 192 * 1024
TILE, BLOCK_OF_SUM = 64, 32

_launch_forward = Launcher(forward)
_launch_backward = Launcher(backward)
_launch_sum = Launcher(add_up)


class Plan(NamedTuple):
    """How rows are shared out; it depends on the columns alone, so that rows do not change bits."""

    rows: int
    """Of a program, at a time."""
    block: int
    """Columns that a program sees: the next power of two."""
    warps: int
    stages: int
    """How far rows are loaded ahead; 0 (forward alone): a program does its rows, and ends."""
    programs_per_sm: int | None
    """Where they go on to other rows; None with 0 stages."""


@functools.cache
def plan_forward(columns: int, row_bytes: int) -> Plan:
    """Return the plan for rows of so many bytes read."""
    return Plan(*tile_of(columns, FORWARD_ELEMENTS), stages=0, programs_per_sm=None)


@functools.cache
def plan_backward(columns: int, row_bytes: int, is_heavy: bool) -> Plan:
    """Return the plan for rows of so many bytes read; heavy ones take twice the registers."""
    rows, block, warps = tile_of(columns, BACKWARD_ELEMENTS)
    threads = BACKWARD_THREADS // (2 if is_heavy or rows > 1 else 1)
    if block >= WHOLE_SM and not is_heavy:
        warps, threads = MOST_WARPS, 32 * MOST_WARPS
    programs = max(1, threads // (32 * warps))
    ahead_bytes = programs * rows * row_bytes
    # 3 stages keep three rows of each program in shared memory, 2 stages up to one and a half.
    stages = 3 if 3 * ahead_bytes <= AHEAD_BYTES else 2 if 3 * ahead_bytes < 2 * AHEAD_BYTES else 1
    return Plan(rows, block, warps, stages, programs)


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
    parts = (x, residual, weight, bias)
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in parts):
        return _WithGradient.apply(*parts, eps, FORMS[form])
    return tuple(_forward(*parts, eps, FORMS[form], False))


class _WithGradient(torch.autograd.Function):
    """The operator with its gradients, outside the dispatcher, where that costs least."""

    @staticmethod
    def forward(ctx: Any, x, residual, weight, bias, eps: float, form: int) -> tuple[Tensor, ...]:
        *results, rstd, mean = _forward(x, residual, weight, bias, eps, form, True)
        ctx.save_for_backward(x if residual is None else results[1], weight, rstd, mean)
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
        is_wanted = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        num_parameters = (1 + ctx.has_bias) * is_wanted
        dx, dparameters = _backward(dy, dsum, x, weight, rstd, mean, ctx.form, num_parameters)
        dweight = dparameters[0] if num_parameters and weight is not None else None
        dbias = dparameters[1] if num_parameters > 1 else None
        return dx, dx if ctx.has_residual else None, dweight, dbias, None, None


def _empty_results(x, residual, weight, bias, eps, form, keeps) -> list[Tensor]:
    """Return y; with a residual, the sum; kept for gradients, rstd, and the mean in two parts."""
    is_wider = weight is not None and form == FORMS["llama"] and weight.dtype != x.dtype
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device) if is_wider else empty_like(x)
    results = [y] if residual is None else [y, empty_like(x)]
    if keeps:
        rows = x.shape[:-1]
        for shape in (rows, (2, *rows) if form == FORMS["layer"] else (0,)):
            results.append(torch.empty(shape, dtype=torch.float32, device=x.device))
    return results


def _run_forward(x, residual, weight, bias, eps, form, keeps) -> list[Tensor]:
    results = _empty_results(x, residual, weight, bias, eps, form, keeps)
    num_rows, columns = count_rows(x), x.shape[-1]
    if not num_rows:
        return results
    rows, stride = rows_of(x)
    others, other_stride = (None, stride) if residual is None else rows_of(residual)
    weight, bias = _side_by_side(weight), _side_by_side(bias)
    rstd, mean = results[-2:] if keeps else (None, None)
    plan = plan_forward(columns, columns * x.element_size() * (1 + (residual is not None)))
    key = (
        *(x.device, x.dtype, columns, form, keeps, residual is None, bias is None),
        None if weight is None else weight.dtype,
        alignments((rows, others, weight, bias), stride, other_stride),
    )
    arguments = (
        *(rows, others, weight, bias, results[0], None if residual is None else results[1]),
        *(mean if form == FORMS["layer"] else None, rstd),
        *(stride, other_stride, num_rows, eps, form, columns, plan.rows, plan.block, plan.stages),
    )
    programs = _num_programs(plan, num_rows, x.device)
    _launch_forward(key, programs, arguments, {"num_warps": plan.warps})
    return results


def _empty_gradients(
    dy, dsum, x, weight, rstd, mean, form, num_parameters
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (and of the residual), and of the weight and the bias."""
    dtype = x.dtype if weight is None else weight.dtype
    dparameters = torch.empty((num_parameters, x.shape[-1]), dtype=dtype, device=x.device)
    return empty_like(x), dparameters


def _run_backward(dy, dsum, x, weight, rstd, mean, form, num_parameters) -> tuple[Tensor, Tensor]:
    dx, dparameters = _empty_gradients(dy, dsum, x, weight, rstd, mean, form, num_parameters)
    num_rows, columns = count_rows(x), x.shape[-1]
    if not num_rows:
        return dx, dparameters.zero_()
    (rows, stride), (dys, dy_stride), weight = rows_of(x), rows_of(dy), _side_by_side(weight)
    dsums, dsum_stride = (None, dy_stride) if dsum is None else rows_of(dsum)
    element_bytes = x.element_size() * (1 + (dsum is not None)) + dy.element_size()
    is_heavy = x.dtype == torch.float32 or form == FORMS["layer"]
    plan = plan_backward(columns, columns * element_bytes, is_heavy)
    programs = _num_programs(plan, num_rows, x.device)
    shares = torch.empty((num_parameters, programs, columns), dtype=torch.float32, device=x.device)
    key = (
        *(x.device, x.dtype, dy.dtype, columns, form, num_parameters, dsum is None),
        None if weight is None else weight.dtype,
        alignments((rows, dys, dsums, weight), stride, dy_stride, dsum_stride),
    )
    arguments = (
        *(dys, dsums, rows, weight, mean if form == FORMS["layer"] else None, rstd, dx, shares),
        *(dy_stride, dsum_stride, stride, num_rows),
        *(form, num_parameters, columns, plan.rows, plan.block, plan.stages),
    )
    _launch_backward(key, programs, arguments, {"num_warps": plan.warps})
    if num_parameters:
        _add_up(shares, dparameters)
    return dx, dparameters


def _num_programs(plan: Plan, num_rows: int, device: torch.device) -> int:
    needed = -(-num_rows // plan.rows)
    return min(needed, plan.programs_per_sm * num_sms(device)) if plan.programs_per_sm else needed


def _add_up(shares: Tensor, total: Tensor) -> None:
    num_parameters, programs, columns = shares.shape
    arguments = (shares, total, programs, columns, TILE, BLOCK_OF_SUM)
    grid = num_parameters * -(-columns // BLOCK_OF_SUM)
    _launch_sum((total.device, total.dtype, columns), grid, arguments, {"num_warps": 4})


def _side_by_side(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.contiguous()


_forward = define(
    "norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, int form,"
    " bool keeps) -> Tensor[]",
    _run_forward,
    _empty_results,
)
_backward = define(
    "norm_backward(Tensor dy, Tensor? dsum, Tensor x, Tensor? weight, Tensor rstd, Tensor mean,"
    " int form, int num_parameters) -> (Tensor, Tensor)",
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
