"""GELU, elementwise, of any shape; with or without the gradient of the bias before it.

    none      y = x * (1 + erf(x / √2)) / 2
    tanh      y = x * (1 + tanh(√(2/π) * (x + 0.044715 x³))) / 2
    sigmoid   y = x * sigmoid(1.702 x)

`gelu` replaces code that writes the formula out, of which each operation reads and writes a tensor.
Forward is one read and one write, backward two reads and one write. The result may have another
dtype than x: float32, as such code has it under autocast, or the dtype to which autocast rounds it
for the linear layer that reads it.

`bias_gelu` replaces torch's operator behind a linear layer with a bias. A GEMM adds a bias for
free, so x holds it already; the gradient of the bias is a sum over the rows of x's gradient, which
a linear layer reads once more. Here the kernel that writes x's gradient adds it up: CTAs walk over
the rows of some columns, and a last kernel adds their parts in a fixed order. Only x is saved.

In names of tensors M is rows, N columns, P parts.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from kprof.kernels import OURS, Kernel, Provider, Work
from kprof.kernels.norm import add_up, overlaps
from kprof.kernels.runtime import (
    DTYPES,
    Launcher,
    alignments,
    applied,
    count_rows,
    define,
    empty,
    kind_of,
    next_power_of_two,
    num_sms,
)
from kprof.kernels.tiles.activations import GELU_ERF, GELU_SIGMOID, GELU_TANH, activate

FORMS = {"none": GELU_ERF.value, "tanh": GELU_TANH.value, "sigmoid": GELU_SIGMOID.value}
# Elements of a CTA: two 16-byte loads for each of 128 threads, in 16 bits.
BLOCK, WARPS = 2_048, 4
# Backward with a bias: elements of a tile, columns of a CTA, CTAs per SM, stages of its prefetch
# pipeline. A CTA holds the sums of a tile in registers; 12 of them fit on an SM.
TILE, MOST_COLUMNS, CTAS_PER_SM, STAGES = 1_024, 512, 12, 3

Approximation = Literal["none", "tanh", "sigmoid"]


def gelu(
    x: Tensor, approximate: Approximation = "tanh", dtype: torch.dtype | None = None
) -> Tensor:
    """Return the GELU of x, computed in float32 and rounded once.

    Args:
        x: Of any shape; float32, float16 or bfloat16.
        approximate: The formula.
        dtype: Of the result; None: x's.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return _with_gradient(x, FORMS[approximate], dtype)
    return _operator(x, FORMS[approximate], dtype)


def bias_gelu(
    x: Tensor,
    bias: Tensor,
    approximate: Approximation = "none",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the GELU of x, to which a bias has been added before, with the bias's gradient.

    Args:
        x: (..., N), with the bias in it; float32, float16 or bfloat16.
        bias: (N,), of the same dtype or float32. Its values are not read.
        approximate: The formula.
        dtype: Of the result; None: x's.
    """
    if torch.is_grad_enabled() and bias.requires_grad:
        return _with_gradients(x, bias, FORMS[approximate], dtype)
    return gelu(x, approximate, dtype)


def _written_out(x: Tensor, approximate: str = "tanh", dtype: torch.dtype | None = None) -> Tensor:
    """Compute what the activations of Hugging Face's GPT-2, BERT and CLIP do."""
    x = _widened(x, dtype)
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        y = 0.5 * x * (1.0 + torch.tanh(inner))
    elif approximate == "none":
        y = x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))
    else:
        y = x * torch.sigmoid(1.702 * x)
    return y.to(dtype or y.dtype)


def _torchs(x: Tensor, approximate: str = "tanh", dtype: torch.dtype | None = None) -> Tensor:
    """Compute it by torch's own operator, where it has one."""
    if approximate == "sigmoid":
        return _written_out(x, approximate, dtype)
    y = functional.gelu(_widened(x, dtype), approximate=approximate)
    return y.to(dtype or y.dtype)


def _widened(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None else x.to(torch.promote_types(x.dtype, dtype))


class _BiasInside(torch.autograd.Function):
    """Returns x, with the gradient of a bias as a linear layer computes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.dtype = bias.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor]:
        # In x's dtype; autocast casts the sum.
        return dx, dx.flatten(0, -2).sum(0).to(ctx.dtype)


def with_bias_inside(x: Tensor, bias: Tensor) -> Tensor:
    """Return x, to which a bias was added without a gradient, with the bias's gradient."""
    return x + (bias - bias.detach()).to(x.dtype)


def _after_bias(
    x: Tensor, bias: Tensor, approximate: str = "none", dtype: torch.dtype | None = None
) -> Tensor:
    return _torchs(with_bias_inside(x, bias), approximate, dtype)


def _behind_linear(
    x: Tensor, bias: Tensor, approximate: str = "none", dtype: torch.dtype | None = None
) -> Tensor:
    """Compute what torch does with a linear layer's result, and the gradient of its bias."""
    return _torchs(_with_bias(x, bias), approximate, dtype)


class _WithGradient(torch.autograd.Function):
    """The operator with its gradient, outside of the dispatcher, which costs less host time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, form: int, dtype: torch.dtype | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.form = form
        return _operator(x, form, dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _operator_backward(dy, *ctx.saved_tensors, ctx.form), None, None


class _WithGradients(torch.autograd.Function):
    """The same with the gradient of a bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, form: int, dtype: torch.dtype | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.form, ctx.dtype = form, bias.dtype
        return _operator(x, form, dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dbias = _operator_backward_of_bias(dy, *ctx.saved_tensors, ctx.form, ctx.dtype)
        return dx, dbias, None, None


def _empty(x, form, dtype=None) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _run_forward(x, form, dtype=None) -> Tensor:
    x = x.contiguous()
    y = _empty(x, form, dtype)
    _launch(_launch_forward, form, x, y)
    return y


def _empty_gradient(dy, x, form) -> Tensor:
    return _empty(x, form)


def _run_backward(dy, x, form) -> Tensor:
    dy, x = dy.contiguous(), x.contiguous()
    dx = _empty(x, form)
    _launch(_launch_backward, form, dy, x, dx)
    return dx


def _launch(launcher: Launcher, form: int, *tensors: Tensor) -> None:
    """Launch over all elements of contiguous tensors, the last of which is written."""
    call, size = (kind_of(*tensors), form), tensors[0].numel()
    if launcher.again(call, tensors) or not size:
        return
    dtypes = tuple(one.dtype for one in tensors)
    key = tensors[0].device, dtypes, form, alignments(tensors, size)
    arguments, options = (*tensors, size, form, BLOCK), {"num_warps": WARPS}
    launcher(key, -(-size // BLOCK), arguments, options, call=call, tensors=tensors)


def _empty_gradients(dy, x, form, dtype) -> list[Tensor]:
    return [_empty(x, form), x.new_empty(x.shape[-1:], dtype=dtype)]


def _run_backward_of_bias(dy, x, form, dtype) -> list[Tensor]:
    dy, x = dy.contiguous(), x.contiguous()
    dx, dbias = _empty_gradients(dy, x, form, dtype)
    num_rows, columns = count_rows(x), x.shape[-1]
    if not num_rows:
        return [dx, dbias.zero_()]
    rows, block = _tile_of(columns)
    blocks, tiles = -(-columns // block), -(-num_rows // rows)
    most = max(1, CTAS_PER_SM * num_sms(x.device) // blocks)
    # The fewest that walk over the rows as fast as so many do.
    parts = -(-tiles // -(-tiles // min(tiles, most)))
    partials = empty((1, parts, columns), torch.float32, x.device)
    tensors = dy, x, dx, partials
    call = kind_of(*tensors), form
    if not _launch_backward_of_bias.again(call, tensors):
        key = x.device, dy.dtype, x.dtype, form, block, alignments(tensors, columns)
        constants = form, rows, block, STAGES, overlaps(x.device)
        arguments, options = (*tensors, columns, num_rows, *constants), {"num_warps": WARPS}
        grid = blocks, parts, 1
        _launch_backward_of_bias(key, grid, arguments, options, call=call, tensors=tensors)
    add_up(partials, dbias)
    return [dx, dbias]


@functools.cache
def _tile_of(columns: int) -> tuple[int, int]:
    """Return rows and columns of a tile."""
    block = min(MOST_COLUMNS, next_power_of_two(columns))
    return max(1, TILE // block), block


@triton.jit
def gelu_forward(x_N, y_N, num_elements: tl.int64, FORM: tl.constexpr, BLOCK: tl.constexpr):
    """Write a block of results."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_N + places, places < num_elements, other=0.0)
    # What is stored in 16 bits needs no exact exponential.
    y, _ = activate(x.to(tl.float32), FORM, y_N.dtype.element_ty == tl.float32)
    tl.store(y_N + places, y.to(y_N.dtype.element_ty), places < num_elements)


@triton.jit
def gelu_backward(dy_N, x_N, dx_N, num_elements: tl.int64, FORM: tl.constexpr, BLOCK: tl.constexpr):
    """Write a block of gradients."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_N + places, places < num_elements, other=0.0)
    dy = tl.load(dy_N + places, places < num_elements, other=0.0).to(tl.float32)
    _, slope = activate(x.to(tl.float32), FORM, x.dtype == tl.float32)
    tl.store(dx_N + places, (dy * slope).to(x.dtype), places < num_elements)


@triton.jit(do_not_specialize=["num_rows"])
def bias_gelu_backward(
    dy_MN,
    x_MN,
    dx_MN,
    dbias_PN,
    columns: tl.int64,
    num_rows,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Write gradients of some columns, and the CTA's part of their sum."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_column = places < columns
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    first, step = tl.program_id(1) * ROWS, tl.num_programs(1) * ROWS
    for row in tl.range(first, num_rows, step, num_stages=STAGES):
        rows = tl.arange(0, ROWS).to(tl.int64) + row
        mask = (rows < num_rows)[:, None] & is_column[None, :]
        inside = rows[:, None] * columns + places[None, :]
        x = tl.load(x_MN + inside, mask, other=0.0)
        dy = tl.load(dy_MN + inside, mask, other=0.0).to(tl.float32)
        _, slope = activate(x.to(tl.float32), FORM, x.dtype == tl.float32)
        dx = dy * slope
        total += dx
        tl.store(dx_MN + inside, dx.to(x.dtype), mask)
    partials = dbias_PN + tl.program_id(1) * columns + places
    tl.store(partials, tl.sum(total, axis=0), is_column)


_launch_forward = Launcher(gelu_forward)
_launch_backward = Launcher(gelu_backward)
_launch_backward_of_bias = Launcher(bias_gelu_backward)
_with_bias = applied(_BiasInside)
_with_gradient = applied(_WithGradient)
_with_gradients = applied(_WithGradients)
_operator = define(
    "gelu(Tensor x, int form, ScalarType? dtype=None) -> Tensor", _run_forward, _empty
)
_operator_backward = define(
    "gelu_backward(Tensor dy, Tensor x, int form) -> Tensor", _run_backward, _empty_gradient
)
_operator_backward_of_bias = define(
    "bias_gelu_backward(Tensor dy, Tensor x, int form, ScalarType dtype) -> Tensor[]",
    _run_backward_of_bias,
    _empty_gradients,
)


def _refuses(x: Tensor, approximate: str = "tanh", dtype: torch.dtype | None = None) -> str | None:
    if dtype is not None and dtype not in DTYPES:
        return f"a result of {dtype}: none of float32, float16 and bfloat16"
    return None if x.dtype in DTYPES else f"{x.dtype} is none of float32, float16 and bfloat16"


def _refuses_bias(x: Tensor, bias: Tensor, *options: Any) -> str | None:
    if not x.dim() or bias.shape != x.shape[-1:]:
        return f"a bias of {tuple(bias.shape)} for {tuple(x.shape)}"
    if bias.dtype not in (x.dtype, torch.float32):
        return f"the bias is {bias.dtype}, the input {x.dtype}"
    return _refuses(x, *options)


def _work(tensors: int, flops: int, x: Tensor, *others: Any) -> Work:
    """Count tensors like x that are read or written, and FLOPs of an element."""
    return Work(flops * x.numel(), tensors * x.numel() * x.element_size())


GELU = Kernel(
    name="gelu",
    replaces="GELU written out, as NewGELUActivation of Hugging Face, in GPT-2",
    reference=_written_out,
    truth=_written_out,
    providers=(
        Provider(OURS, lambda: gelu, "kprof"),
        Provider("eager", lambda: _written_out),
        Provider("inductor", lambda: torch.compile(_written_out, dynamic=False)),
        Provider("aten", lambda: _torchs),
    ),
    refuses=_refuses,
    inputs=lambda shape, draw: (draw(*shape),),
    work=functools.partial(_work, 2, 10),
    shapes=((8_192, 4_096), (12_288, 3_072)),
    edges=((5, 127), (3, 4_097)),
    free=(0, 1),
    reach=(2**20,),
    differentiable=(0,),
    backward_work=functools.partial(_work, 3, 20),
    rows=(0,),
    sources=(
        "Hendrycks and Gimpel, Gaussian Error Linear Units, arXiv 1606.08415",
        "transformers, NewGELUActivation and QuickGELUActivation",
    ),
)
BIAS_GELU = replace(
    GELU,
    name="bias_gelu",
    replaces="GELU behind a linear layer with a bias, as in BERT and ViT, and the bias's gradient",
    reference=_after_bias,
    truth=_after_bias,
    providers=(
        Provider(OURS, lambda: bias_gelu, "kprof"),
        Provider("eager", lambda: _behind_linear),
        Provider("inductor", lambda: torch.compile(_behind_linear, dynamic=False)),
    ),
    refuses=_refuses_bias,
    inputs=lambda shape, draw: (draw(*shape), draw.plain(shape[-1])),
    reach=(2**20,),
    differentiable=(0, 1),
    backward_work=functools.partial(_work, 3, 21),
)
KERNELS = (GELU, BIAS_GELU)
