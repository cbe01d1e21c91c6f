"""Gated units, activation(gate) * up, as one operator of torch with its gradients.

Elements are independent, so contiguous tensors are one long row. The halves of one packed tensor
are rows twice as far apart as they are long, and their gradients are written so, too.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kprof.kernels import Work
from kprof.kernels.runtime import (
    DTYPES,
    Launcher,
    alignments,
    applied,
    count_rows,
    define,
    empty_like,
    kind_of,
    next_power_of_two,
    rows_of,
)
from kprof.kernels.tiles.exact import divide, exp

SILU: tl.constexpr = tl.constexpr(0)
GELU_TANH: tl.constexpr = tl.constexpr(1)
GELU_ERF: tl.constexpr = tl.constexpr(2)
ACTIVATIONS = {"silu": SILU.value, "gelu_tanh": GELU_TANH.value, "gelu": GELU_ERF.value}
MOST_ELEMENTS = 2_048
ELEMENTS_PER_WARP = 512


@triton.jit
def _activate(gate, KIND: tl.constexpr, IS_EXACT: tl.constexpr):
    """Return the activation and its derivative."""
    if KIND == GELU_ERF:
        cdf = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        density = 0.3989422804014327 * exp(-0.5 * gate * gate, IS_EXACT)
        return gate * cdf, cdf + gate * density
    # tanh(u) = 2 sigmoid(2u) - 1, which makes both of these gates times a sigmoid.
    inner = gate
    slope = 1.0
    if KIND == GELU_TANH:
        square = gate * gate
        inner = 1.5957691216057308 * (gate + 0.044715 * square * gate)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * square)
    power = exp(-inner, IS_EXACT)
    sigmoid = divide(tl.full(gate.shape, 1.0, tl.float32), 1.0 + power, IS_EXACT)
    # One less the sigmoid, without cancellation.
    rest = tl.where(inner < 0.0, 1.0 - sigmoid, power * sigmoid)
    return divide(gate, 1.0 + power, IS_EXACT), sigmoid + gate * sigmoid * rest * slope


@triton.jit(do_not_specialize=["blocks"])
def _forward(
    gate_MN,
    up_MN,
    y_MN,
    gate_stride: tl.int64,
    up_stride: tl.int64,
    columns: tl.int64,
    blocks,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    places = tl.arange(0, BLOCK)
    mask = places < tl.minimum(columns - first, BLOCK).to(tl.int32)
    gate = tl.load(gate_MN + row * gate_stride + first + places, mask, other=0.0)
    up = tl.load(up_MN + row * up_stride + first + places, mask, other=0.0)
    activated, _ = _activate(gate.to(tl.float32), KIND, gate.dtype == tl.float32)
    # Hugging Face's order: the activation is rounded before the product.
    y = activated.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(y_MN + row * columns + first + places, y.to(gate.dtype), mask)


@triton.jit(do_not_specialize=["blocks"])
def _backward(
    dy_MN,
    gate_MN,
    up_MN,
    dgate_MN,
    dup_MN,
    dy_stride: tl.int64,
    gate_stride: tl.int64,
    up_stride: tl.int64,
    out_stride: tl.int64,
    columns: tl.int64,
    blocks,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    places = tl.arange(0, BLOCK)
    mask = places < tl.minimum(columns - first, BLOCK).to(tl.int32)
    gate = tl.load(gate_MN + row * gate_stride + first + places, mask, other=0.0)
    up = tl.load(up_MN + row * up_stride + first + places, mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_MN + row * dy_stride + first + places, mask, other=0.0).to(tl.float32)
    activated, slope = _activate(gate.to(tl.float32), KIND, gate.dtype == tl.float32)
    dgate = dy * up * slope
    dup = dy * activated.to(gate.dtype).to(tl.float32)
    tl.store(dgate_MN + row * out_stride + first + places, dgate.to(gate.dtype), mask)
    tl.store(dup_MN + row * out_stride + first + places, dup.to(gate.dtype), mask)


_launch_forward = Launcher(_forward)
_launch_backward = Launcher(_backward)


def gated(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """Return activation(gate) * up, elementwise; without up, gate holds both, itself first.

    Args:
        gate: (..., N), or (..., 2N) without up; float32, float16 or bfloat16.
        up: (..., N), of the same dtype.
        activation: Of `ACTIVATIONS`.
    """
    kind = ACTIVATIONS[activation]
    if torch.is_grad_enabled() and (gate.requires_grad or (up is not None and up.requires_grad)):
        return _with_gradient(gate, up, kind)
    return _operator_forward(*_halves(gate, up), kind)


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    if up is not None:
        return gate, up
    columns = gate.shape[-1] // 2
    return gate[..., :columns], gate[..., columns:]


class _WithGradient(torch.autograd.Function):
    """The operator with its gradients, outside the dispatcher, where that costs least."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, kind: int) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return _operator_forward(*_halves(gate, up), kind)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        gate, up = ctx.saved_tensors
        gradient = _operator_backward(dy, *_halves(gate, up), ctx.kind, up is None)
        return (gradient[0], gradient[1], None) if up is not None else (gradient[0], None, None)


_with_gradient = applied(_WithGradient)


def _run_forward(gate: Tensor, up: Tensor, kind: int) -> Tensor:
    y = empty_like(gate)
    call, tensors = (kind_of(gate, up), kind), (gate, up, y)
    if _launch_forward.again(call, tensors):
        return y
    num_rows, columns = count_rows(gate), gate.shape[-1]
    if not num_rows:
        return y
    (gates, gate_stride), (ups, up_stride) = rows_of(gate), rows_of(up)
    if gate_stride == up_stride == columns:
        num_rows, columns = 1, num_rows * columns
    block = min(MOST_ELEMENTS, next_power_of_two(columns))
    blocks = -(-columns // block)
    arguments = (gates, ups, y, gate_stride, up_stride, columns, blocks, kind, block)
    aligned = alignments((gates, ups), gate_stride, up_stride, columns)
    key = (gate.device, gate.dtype, kind, block, aligned)
    options = {"num_warps": _num_warps(block)}
    _launch_forward(key, num_rows * blocks, arguments, options, call=call, tensors=tensors)
    return y


def _empty_gradients(dy, gate, up, kind, packs) -> list[Tensor]:
    """Return the gradients of gate and up, or the one of what both are halves of."""
    if packs:
        shape = (*gate.shape[:-1], 2 * gate.shape[-1])
        return [torch.empty(shape, dtype=gate.dtype, device=gate.device)]
    return [empty_like(gate), empty_like(gate)]


def _run_backward(dy, gate, up, kind, packs) -> list[Tensor]:
    gradients = _empty_gradients(dy, gate, up, kind, packs)
    dgate, dup = _halves(gradients[0], None) if packs else gradients
    call, tensors = (kind_of(dy, gate, up), kind, packs), (dy, gate, up, dgate, dup)
    if not _launch_backward.again(call, tensors) and count_rows(gate):
        _launch_backward_first(call, tensors, kind, packs)
    return gradients


def _launch_backward_first(call, tensors, kind, packs) -> None:
    """Launch what was not launched for such tensors before."""
    dy, gate, up, dgate, dup = tensors
    num_rows, columns = count_rows(gate), gate.shape[-1]
    parts = [rows_of(one) for one in (dy, gate, up)]
    given, strides = [part[0] for part in parts], [part[1] for part in parts]
    strides.append(2 * columns if packs else columns)
    if all(stride == columns for stride in strides):
        num_rows, columns = 1, num_rows * columns
    block = min(MOST_ELEMENTS, next_power_of_two(columns))
    blocks = -(-columns // block)
    arguments = (*given, dgate, dup, *strides, columns, blocks, kind, block)
    key = (gate.device, gate.dtype, kind, block, alignments((*given, dup), *strides, columns))
    options = {"num_warps": _num_warps(block)}
    _launch_backward(key, num_rows * blocks, arguments, options, call=call, tensors=tensors)


def _num_warps(block: int) -> int:
    return max(1, block // ELEMENTS_PER_WARP)


_operator_forward = define(
    "glu(Tensor gate, Tensor up, int activation) -> Tensor",
    _run_forward,
    lambda gate, up, kind: empty_like(gate),
)
_operator_backward = define(
    "glu_backward(Tensor dy, Tensor gate, Tensor up, int activation, bool packs) -> Tensor[]",
    _run_backward,
    _empty_gradients,
)


def why_not(gate: Tensor, up: Tensor | None = None, *options: Any) -> str | None:
    """Return why these tensors are not taken."""
    if gate.dtype not in DTYPES:
        return f"{gate.dtype} is none of float32, float16 and bfloat16"
    if up is None:
        is_odd = gate.dim() == 0 or gate.shape[-1] % 2
        return f"no two halves in {tuple(gate.shape)}" if is_odd else None
    if gate.dim() == 0 or up.shape != gate.shape or up.dtype != gate.dtype:
        return f"up is {tuple(up.shape)} {up.dtype}, the gate {tuple(gate.shape)} {gate.dtype}"
    return None


def work_of(
    tensors: int, flops: int, gate: Tensor, up: Tensor | None = None, *options: Any
) -> Work:
    """Count so many tensors like the gate; FLOPs are those of an element."""
    numel = gate.numel() // (2 if up is None else 1)
    return Work(flops * numel, tensors * numel * gate.element_size())
