"""Norms and SwiGLU that write, beside their result, its rows in FP8: its twin.

In bfloat16 the result is what the kernel without a twin writes, and the twin is what `quantize_fp8`
makes of that, both to the bit: the norm is that very kernel, followed by the end of the quantising
one. Elsewhere the compiler fuses other products: last bits of LayerNorm differ in float16, and of
all in float32, which no layer in FP8 takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kprof.kernels._exact import divide, exp
from kprof.kernels._fp8 import FP8, LARGEST, LEAST, rows_of_program, store_rows
from kprof.kernels._launch import Launcher, alignments, kind_of
from kprof.kernels._norm import FEW_COLUMNS, FORMS, plan_forward
from kprof.kernels._norm_device import forward
from kprof.kernels._operator import define
from kprof.kernels._rows import count_rows, empty_like, rows_of
from kprof.kernels.add_layernorm import add_layernorm
from kprof.kernels.add_rmsnorm import add_rmsnorm
from kprof.kernels.layernorm import layernorm
from kprof.kernels.rmsnorm import rmsnorm
from kprof.kernels.swiglu import swiglu


class Twin(NamedTuple):
    """The rows of an activation in FP8, as `quantize_fp8` gives them."""

    values: Tensor
    """(M, N), where the activation is (..., N) of M rows."""
    scales: Tensor
    """(M, 1)."""


@triton.jit(do_not_specialize=["num_rows"])
def norm_and_twin(
    x_MN,
    residual_MN,
    weight_N,
    bias_N,
    y_MN,
    sum_MN,
    values_MN,
    scale_M,
    x_stride: tl.int64,
    residual_stride: tl.int64,
    num_rows,
    eps,
    FORM: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_WEIGHT_EARLY: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Normalise rows, and quantise what that stored, a scale for each row."""
    forward(
        x_MN,
        residual_MN,
        weight_N,
        bias_N,
        y_MN,
        sum_MN,
        None,
        None,
        x_stride,
        residual_stride,
        num_rows,
        eps,
        FORM,
        COLUMNS,
        ROWS,
        BLOCK,
        IS_WEIGHT_EARLY,
    )
    # What other threads of this program stored is there behind it.
    tl.debug_barrier()
    rows = tl.arange(0, ROWS).to(tl.int64) + tl.program_id(0) * ROWS
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < COLUMNS)[None, :]
    y = tl.load(y_MN + rows[:, None] * COLUMNS + columns[None, :], mask, other=0.0)
    y32 = y.to(tl.float32)
    store_rows(y32, values_MN, scale_M, rows, num_rows, COLUMNS, LARGEST, LEAST, BLOCK)


@triton.jit(do_not_specialize=["num_rows"])
def swiglu_and_twin(
    gate_MN,
    up_MN,
    y_MN,
    values_MN,
    scale_M,
    gate_stride: tl.int64,
    up_stride: tl.int64,
    num_rows,
    num_columns,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gate rows by SwiGLU, and quantise what that stored, a scale for each row."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    gate = tl.load(gate_MN + rows[:, None] * gate_stride + columns[None, :], mask, other=0.0)
    up = tl.load(up_MN + rows[:, None] * up_stride + columns[None, :], mask, other=0.0)
    gate32, is_exact = gate.to(tl.float32), gate.dtype == tl.float32
    activated = divide(gate32, 1.0 + exp(-gate32, is_exact), is_exact)
    y = (activated.to(gate.dtype).to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(y_MN + rows[:, None] * num_columns + columns[None, :], y, mask)
    y32 = y.to(tl.float32)
    store_rows(y32, values_MN, scale_M, rows, num_rows, num_columns, LARGEST, LEAST, BLOCK)


_launch_norm, _launch_swiglu = Launcher(norm_and_twin), Launcher(swiglu_and_twin)


def _empty_twin(x: Tensor) -> list[Tensor]:
    num_rows, columns = count_rows(x), x.shape[-1]
    values = torch.empty(num_rows, columns, dtype=FP8, device=x.device)
    return [values, torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)]


def _empty_norm(x, residual, weight, bias, eps, form) -> list[Tensor]:
    """Return y; with a residual, the sum; the twin's values and scales."""
    like = [empty_like(x)] if residual is None else [empty_like(x), empty_like(x)]
    return [*like, *_empty_twin(x)]


def _run_norm(x, residual, weight, bias, eps, form) -> list[Tensor]:
    results = _empty_norm(x, residual, weight, bias, eps, form)
    added = None if residual is None else results[1]
    tensors = (x, residual, weight, bias, results[0], added, *results[-2:])
    call = kind_of(x, residual, weight, bias), eps, form
    if _launch_norm.again(call, tensors) or not count_rows(x):
        return results
    num_rows, columns = count_rows(x), x.shape[-1]
    rows, stride = rows_of(x)
    others, other_stride = (None, stride) if residual is None else rows_of(residual)
    weight, bias = (None if one is None else one.contiguous() for one in (weight, bias))
    rows_each, block, warps = plan_forward(columns)
    key = (
        *(x.device, x.dtype, columns, form, residual is None, weight is None, bias is None),
        alignments((rows, others, weight, bias), stride, other_stride),
    )
    arguments = (
        *(rows, others, weight, bias, *tensors[4:], stride, other_stride, num_rows, eps),
        *(form, columns, rows_each, block, block > FEW_COLUMNS, LARGEST, LEAST),
    )
    programs, options = -(-num_rows // rows_each), {"num_warps": warps}
    _launch_norm(key, programs, arguments, options, call=call, tensors=tensors)
    return results


def _empty_swiglu(gate: Tensor, up: Tensor) -> list[Tensor]:
    return [empty_like(gate), *_empty_twin(gate)]


def _run_swiglu(gate: Tensor, up: Tensor) -> list[Tensor]:
    results = _empty_swiglu(gate, up)
    tensors, call = (gate, up, *results), kind_of(gate, up)
    if _launch_swiglu.again(call, tensors) or not count_rows(gate):
        return results
    num_rows, columns = count_rows(gate), gate.shape[-1]
    (gates, gate_stride), (ups, up_stride) = rows_of(gate), rows_of(up)
    rows_each, block, num_warps = rows_of_program(columns)
    steps = alignments((gates, ups), gate_stride, up_stride, columns)
    key = gate.device, gate.dtype, columns, steps
    sizes = gate_stride, up_stride, num_rows, columns
    arguments = (gates, ups, *results, *sizes, LARGEST, LEAST, rows_each, block)
    programs, options = -(-num_rows // rows_each), {"num_warps": num_warps}
    _launch_swiglu(key, programs, arguments, options, call=call, tensors=tensors)
    return results


_norm = define(
    "norm_and_twin(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, int form)"
    " -> Tensor[]",
    _run_norm,
    _empty_norm,
)
_swiglu = define("glu_and_twin(Tensor gate, Tensor up) -> Tensor[]", _run_swiglu, _empty_swiglu)


def _normed(form: str, x, residual, weight, bias, eps: float) -> tuple[Any, Twin]:
    y, *added, values, scales = _norm(x, residual, weight, bias, float(eps), FORMS[form])
    return (y if residual is None else (y, *added)), Twin(values, scales)


def _gated(gate: Tensor, up: Tensor | None = None) -> tuple[Tensor, Twin]:
    gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
    y, values, scales = _swiglu(gate, up)
    return y, Twin(values, scales)


# What returns what a function returns, and the twin of its first tensor; no gradients. All tensors
# have one dtype.
WITH_TWIN: dict[Callable[..., Any], Callable[..., tuple[Any, Twin]]] = {
    rmsnorm: lambda x, weight, eps=1e-6, form="llama": _normed(form, x, None, weight, None, eps),
    add_rmsnorm: lambda x, residual, weight, eps=1e-6, form="llama": _normed(
        form, x, residual, weight, None, eps
    ),
    layernorm: lambda x, weight=None, bias=None, eps=1e-5: _normed(
        "layer", x, None, weight, bias, eps
    ),
    add_layernorm: lambda x, residual, weight=None, bias=None, eps=1e-5: _normed(
        "layer", x, residual, weight, bias, eps
    ),
    swiglu: _gated,
}
