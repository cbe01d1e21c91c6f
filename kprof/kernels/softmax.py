"""Softmax over the last dimension: y = exp(x - max(x)) / sum(exp(x - max(x))), with gradients.

x is (..., N). A CTA has one row or several: one read and one write where they fit the registers.
Longer rows are read twice, a part at a time; the second read mostly hits L2. `softmax` is the
public function.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kprof.kernels import OURS, Kernel, Provider, Work
from kprof.kernels.runtime import (
    DTYPES,
    MOST_WARPS,
    Launcher,
    alignments,
    applied,
    count_rows,
    define,
    empty_like,
    is_widened,
    kind_of,
    rows_of,
    tile_of,
)
from kprof.kernels.tiles.exact import divide, exp

ELEMENTS = 4_096
# Of the longest row that fits the registers.
FORWARD_BYTES, BACKWARD_COLUMNS = 65_536, 16_384
PART = 16_384


@triton.jit(do_not_specialize=["num_rows"])
def softmax_forward_kernel(
    x_MN,
    y_MN,
    x_stride: tl.int64,
    num_rows,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute ROWS whole rows."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_rows)[:, None] & (columns < COLUMNS)
    x = tl.load(x_MN + rows[:, None] * x_stride + columns, mask, other=float("-inf"))
    x32 = x.to(tl.float32)
    # Rows behind the last one are all -inf, and are not stored.
    powers = exp(x32 - tl.max(x32, axis=1)[:, None], x.dtype == tl.float32)
    y = divide(powers, tl.sum(powers, axis=1)[:, None], x.dtype == tl.float32)
    tl.store(y_MN + rows[:, None] * COLUMNS + columns, y.to(x.dtype), mask)


@triton.jit
def softmax_forward_in_parts_kernel(
    x_MN, y_MN, x_stride: tl.int64, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute one row, BLOCK columns at a time, by an online softmax."""
    row = tl.program_id(0).to(tl.int64)
    x_MN += row * x_stride
    y_MN += row * COLUMNS
    IS_EXACT: tl.constexpr = x_MN.dtype.element_ty == tl.float32
    largest = float("-inf")
    total = 0.0
    for first in tl.range(0, COLUMNS, BLOCK, num_stages=2):
        columns = tl.arange(0, BLOCK) + first
        x = tl.load(x_MN + columns, columns < COLUMNS, other=float("-inf")).to(tl.float32)
        before = largest
        largest = tl.maximum(largest, tl.max(x, axis=0))
        # While all are -inf the shift is 0, as -inf - (-inf) is NaN.
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        total = total * tl.exp(before - shift) + tl.sum(exp(x - shift, IS_EXACT), axis=0)
    for first in tl.range(0, COLUMNS, BLOCK, num_stages=2):
        columns = tl.arange(0, BLOCK) + first
        x = tl.load(x_MN + columns, columns < COLUMNS, other=0.0)
        y = divide(exp(x.to(tl.float32) - largest, IS_EXACT), total, IS_EXACT)
        tl.store(y_MN + columns, y.to(x.dtype), columns < COLUMNS)


@triton.jit(do_not_specialize=["num_rows"])
def softmax_backward_kernel(
    dy_MN,
    y_MN,
    dx_MN,
    dy_stride: tl.int64,
    y_stride: tl.int64,
    num_rows,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradient of ROWS whole rows: y * (dy - sum(dy * y))."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_rows)[:, None] & (columns < COLUMNS)
    y = tl.load(y_MN + rows[:, None] * y_stride + columns, mask, other=0.0)
    dy = tl.load(dy_MN + rows[:, None] * dy_stride + columns, mask, other=0.0).to(tl.float32)
    y32 = y.to(tl.float32)
    dx = y32 * (dy - tl.sum(dy * y32, axis=1)[:, None])
    tl.store(dx_MN + rows[:, None] * COLUMNS + columns, dx.to(y.dtype), mask)


@triton.jit
def softmax_backward_in_parts_kernel(
    dy_MN,
    y_MN,
    dx_MN,
    dy_stride: tl.int64,
    y_stride: tl.int64,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradient of one row, BLOCK columns at a time."""
    row = tl.program_id(0).to(tl.int64)
    dy_MN += row * dy_stride
    y_MN += row * y_stride
    dx_MN += row * COLUMNS
    total = 0.0
    for first in tl.range(0, COLUMNS, BLOCK, num_stages=2):
        columns = tl.arange(0, BLOCK) + first
        dy = tl.load(dy_MN + columns, columns < COLUMNS, other=0.0).to(tl.float32)
        y = tl.load(y_MN + columns, columns < COLUMNS, other=0.0).to(tl.float32)
        total += tl.sum(dy * y, axis=0)
    for first in tl.range(0, COLUMNS, BLOCK, num_stages=2):
        columns = tl.arange(0, BLOCK) + first
        dy = tl.load(dy_MN + columns, columns < COLUMNS, other=0.0).to(tl.float32)
        y = tl.load(y_MN + columns, columns < COLUMNS, other=0.0)
        dx = y.to(tl.float32) * (dy - total)
        tl.store(dx_MN + columns, dx.to(y.dtype), columns < COLUMNS)


_launch_forward = Launcher(softmax_forward_kernel)
_launch_forward_in_parts = Launcher(softmax_forward_in_parts_kernel)
_launch_backward = Launcher(softmax_backward_kernel)
_launch_backward_in_parts = Launcher(softmax_backward_in_parts_kernel)


def softmax(x: Tensor) -> Tensor:
    """Return the softmax over the last dimension, computed in float32 and rounded once.

    Args:
        x: (..., N); float32, float16 or bfloat16.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return _with_gradient(x)
    return _operator(x)


class _WithGradient(torch.autograd.Function):
    """The operator with gradients, outside the dispatcher, which is faster."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = _operator(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return _operator_backward(dy, *ctx.saved_tensors)


_with_gradient = applied(_WithGradient)


def _run_forward(x: Tensor) -> Tensor:
    y = empty_like(x)
    call, tensors = kind_of(x), (x, y)
    if _launch_forward.again(call, tensors):
        return y
    num_rows, columns = count_rows(x), x.shape[-1]
    if not num_rows:
        return y
    rows, stride = rows_of(x)
    key = (x.device, x.dtype, columns, alignments((rows,), stride))
    if columns * x.element_size() > FORWARD_BYTES:
        parts = (rows, y, stride, columns, PART)
        _launch_forward_in_parts(key, num_rows, parts, {"num_warps": MOST_WARPS})
        return y
    rows_each, block, warps = tile_of(columns, ELEMENTS)
    arguments = (rows, y, stride, num_rows, columns, rows_each, block)
    grid, options = -(-num_rows // rows_each), {"num_warps": warps}
    _launch_forward(key, grid, arguments, options, call=call, tensors=tensors)
    return y


def _run_backward(dy: Tensor, y: Tensor) -> Tensor:
    dx = empty_like(y)
    call, tensors = kind_of(dy, y), (dy, y, dx)
    if _launch_backward.again(call, tensors):
        return dx
    num_rows, columns = count_rows(y), y.shape[-1]
    if not num_rows:
        return dx
    (rows, stride), (dys, dy_stride) = rows_of(y), rows_of(dy)
    key = (y.device, y.dtype, columns, alignments((rows, dys), stride, dy_stride))
    if columns > BACKWARD_COLUMNS:
        parts = (dys, rows, dx, dy_stride, stride, columns, PART)
        _launch_backward_in_parts(key, num_rows, parts, {"num_warps": MOST_WARPS})
        return dx
    rows_each, block, warps = tile_of(columns, ELEMENTS)
    arguments = (dys, rows, dx, dy_stride, stride, num_rows, columns, rows_each, block)
    grid, options = -(-num_rows // rows_each), {"num_warps": warps}
    _launch_backward(key, grid, arguments, options, call=call, tensors=tensors)
    return dx


_operator = define("softmax(Tensor x) -> Tensor", _run_forward, empty_like)
_operator_backward = define(
    "softmax_backward(Tensor dy, Tensor y) -> Tensor", _run_backward, lambda dy, y: empty_like(y)
)


def _reference(x: Tensor) -> Tensor:
    return torch.softmax(x, dim=-1)


def _refuses(x: Tensor) -> str | None:
    if x.dtype not in DTYPES or x.dim() == 0:
        return f"{x.dtype} of {x.dim()} dimensions: not float32, float16 or bfloat16, or no rows"
    return "autocast is on, and makes this float32" if is_widened(x) else None


def _backward_work(x: Tensor) -> Work:
    return Work(4 * x.numel(), 3 * x.numel() * x.element_size())


def _liger() -> Any:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return LigerSoftmaxFunction.apply


def _quack() -> Any:
    from quack import softmax as quack_softmax

    return lambda x: quack_softmax(x.reshape(-1, x.shape[-1])).reshape(x.shape)


KERNEL = Kernel(
    name="softmax",
    replaces="torch.softmax over the last dimension",
    reference=_reference,
    truth=_reference,
    providers=(
        Provider(OURS, lambda: softmax, "kprof"),
        Provider("aten", lambda: _reference),
        Provider("inductor", lambda: torch.compile(_reference, dynamic=False)),
        Provider("liger", _liger, "liger-kernel"),
        Provider("quack", _quack, "quack-kernels"),
    ),
    refuses=_refuses,
    inputs=lambda shape, draw: (draw(*shape),),
    work=lambda x: Work(5 * x.numel(), 2 * x.numel() * x.element_size()),
    shapes=((32_768, 2_048), (8_192, 4_096), (16_384, 8_192), (4_096, 32_000), (8_192, 128_256)),
    edges=((5, 127), (3, 4_097), (2, 32_769)),
    free=(0, 1),
    reach=(2**20, 2**18),
    differentiable=(0,),
    backward_work=_backward_work,
    rows=(0,),
    sources=("Milakov and Gimelshein, Online normalizer calculation, arXiv 1805.02867",),
)
