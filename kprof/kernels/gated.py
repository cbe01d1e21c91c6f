"""Gated units: y = activation(gate) * up, elementwise, with SiLU (SwiGLU) or GELU (GeGLU).

gate, up and y are (..., N); or one tensor (..., 2N) holds gate and up, in either order. The
activation is rounded before the product, as Hugging Face rounds it. Forward is two reads and one
write; backward three reads and two writes.

On the GPU contiguous tensors are one long row that CTAs share in blocks. The halves of one packed
tensor are rows whose stride is twice their length; the gradients are packed in the same way.

Entered by `swiglu` and `geglu`. A further activation is a number, an entry of `ACTIVATIONS`, a
branch of `activate`, a public function and a `Kernel`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from kprof.kernels import OURS, Kernel, Provider, Work
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
from kprof.kernels.tiles.activations import GELU_ERF, GELU_TANH, SILU, activate

ACTIVATIONS = {"silu": SILU.value, "gelu_tanh": GELU_TANH.value, "gelu": GELU_ERF.value}
# Elements of a block, and of a warp: two loads of 16 bytes per thread in 16 bits.
MOST_ELEMENTS, ELEMENTS_PER_WARP = 2_048, 512

Approximation = Literal["tanh", "none"]


def swiglu(gate: Tensor, up: Tensor | None = None, is_up_first: bool = False) -> Tensor:
    """Return silu(gate) * up.

    Args:
        gate: (..., N), or without up (..., 2N), which holds both; float32, float16 or bfloat16.
        up: (..., N), of the same dtype. Rows may have a stride, as in one packed tensor.
        is_up_first: Whether up is the first half of one tensor.
    """
    return _gated(gate, up, "silu", is_up_first)


def geglu(
    gate: Tensor,
    up: Tensor | None = None,
    approximate: Approximation = "tanh",
    is_up_first: bool = False,
) -> Tensor:
    """Return gelu(gate) * up.

    Args:
        gate: (..., N), or without up (..., 2N), which holds both; float32, float16 or bfloat16.
        up: (..., N), of the same dtype. Rows may have a stride, as in one packed tensor.
        approximate: As of torch's gelu: "tanh" (Gemma), or "none" for the error function.
        is_up_first: Whether up is the first half of one tensor.
    """
    return _gated(gate, up, "gelu_tanh" if approximate == "tanh" else "gelu", is_up_first)


def _swiglu_reference(gate: Tensor, up: Tensor | None = None, is_up_first: bool = False) -> Tensor:
    """Compute what the MLP of Hugging Face's Llama or Phi-3 does."""
    gate, up = halves_of(gate, up, is_up_first)
    return torch.nn.functional.silu(gate) * up


def _swiglu_truth(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate) * up


def _geglu_reference(
    gate: Tensor,
    up: Tensor | None = None,
    approximate: Approximation = "tanh",
    is_up_first: bool = False,
) -> Tensor:
    """Compute what the MLP of Hugging Face's Gemma does."""
    gate, up = halves_of(gate, up, is_up_first)
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


def _geglu_truth(gate: Tensor, up: Tensor, approximate: Approximation = "tanh") -> Tensor:
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


def _gated(gate: Tensor, up: Tensor | None, activation: str, is_up_first: bool) -> Tensor:
    kind = ACTIVATIONS[activation]
    if torch.is_grad_enabled() and (gate.requires_grad or (up is not None and up.requires_grad)):
        return _with_gradient(gate, up, kind, is_up_first)
    return _operator_forward(*halves_of(gate, up, is_up_first), kind)


def halves_of(gate: Tensor, up: Tensor | None, is_up_first: bool = False) -> tuple[Tensor, Tensor]:
    """Return gate and up, which may be the halves of one tensor."""
    if up is not None:
        return gate, up
    columns = gate.shape[-1] // 2
    first, second = gate[..., :columns], gate[..., columns:]
    return (second, first) if is_up_first else (first, second)


class _WithGradient(torch.autograd.Function):
    """The operator with its gradients, outside of the dispatcher, which costs less host time."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, kind: int, is_up_first: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind, ctx.is_up_first = kind, is_up_first
        return _operator_forward(*halves_of(gate, up, is_up_first), kind)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        halves = halves_of(gate, up, ctx.is_up_first)
        gradient = _operator_backward(dy, *halves, ctx.kind, up is None, ctx.is_up_first)
        return gradient[0], gradient[1] if up is not None else None, None, None


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


def _empty_gradients(dy, gate, up, kind, packs, is_up_first=False) -> list[Tensor]:
    """Return the gradients of gate and up, or that of the packed tensor."""
    if packs:
        shape = (*gate.shape[:-1], 2 * gate.shape[-1])
        return [torch.empty(shape, dtype=gate.dtype, device=gate.device)]
    return [empty_like(gate), empty_like(gate)]


def _run_backward(dy, gate, up, kind, packs, is_up_first=False) -> list[Tensor]:
    gradients = _empty_gradients(dy, gate, up, kind, packs)
    dgate, dup = halves_of(gradients[0], None, is_up_first) if packs else gradients
    call, tensors = (kind_of(dy, gate, up), kind, packs, is_up_first), (dy, gate, up, dgate, dup)
    if not _launch_backward.again(call, tensors) and count_rows(gate):
        _launch_backward_first(call, tensors, kind, packs)
    return gradients


def _launch_backward_first(call, tensors, kind, packs) -> None:
    """Launch for the first call with such tensors."""
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
    key = (
        gate.device,
        gate.dtype,
        kind,
        block,
        alignments((*given, dgate, dup), *strides, columns),
    )
    options = {"num_warps": _num_warps(block)}
    _launch_backward(key, num_rows * blocks, arguments, options, call=call, tensors=tensors)


def _num_warps(block: int) -> int:
    return max(1, block // ELEMENTS_PER_WARP)


@triton.jit(do_not_specialize=["blocks"])
def gated_forward(
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
    """Write a block of one row of activation(gate) * up."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    places = tl.arange(0, BLOCK)
    mask = places < tl.minimum(columns - first, BLOCK).to(tl.int32)
    gate = tl.load(gate_MN + row * gate_stride + first + places, mask, other=0.0)
    up = tl.load(up_MN + row * up_stride + first + places, mask, other=0.0)
    activated, _ = activate(gate.to(tl.float32), KIND, gate.dtype == tl.float32)
    # The activation is rounded before the product, as Hugging Face rounds it.
    y = activated.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(y_MN + row * columns + first + places, y.to(gate.dtype), mask)


@triton.jit(do_not_specialize=["blocks"])
def gated_backward(
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
    """Write a block of one row of the gradients of gate and up."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    places = tl.arange(0, BLOCK)
    mask = places < tl.minimum(columns - first, BLOCK).to(tl.int32)
    gate = tl.load(gate_MN + row * gate_stride + first + places, mask, other=0.0)
    up = tl.load(up_MN + row * up_stride + first + places, mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_MN + row * dy_stride + first + places, mask, other=0.0).to(tl.float32)
    activated, slope = activate(gate.to(tl.float32), KIND, gate.dtype == tl.float32)
    dgate = dy * up * slope
    dup = dy * activated.to(gate.dtype).to(tl.float32)
    tl.store(dgate_MN + row * out_stride + first + places, dgate.to(gate.dtype), mask)
    tl.store(dup_MN + row * out_stride + first + places, dup.to(gate.dtype), mask)


_launch_forward = Launcher(gated_forward)
_launch_backward = Launcher(gated_backward)
_with_gradient = applied(_WithGradient)
_operator_forward = define(
    "glu(Tensor gate, Tensor up, int activation) -> Tensor",
    _run_forward,
    lambda gate, up, kind: empty_like(gate),
)
_operator_backward = define(
    "glu_backward(Tensor dy, Tensor gate, Tensor up, int activation, bool packs,"
    " bool is_up_first=False) -> Tensor[]",
    _run_backward,
    _empty_gradients,
)


def _refuses(gate: Tensor, up: Tensor | None = None, *options: Any) -> str | None:
    if gate.dtype not in DTYPES:
        return f"{gate.dtype} is none of float32, float16 and bfloat16"
    if up is None:
        is_odd = gate.dim() == 0 or gate.shape[-1] % 2
        return f"no two halves in {tuple(gate.shape)}" if is_odd else None
    if gate.dim() == 0 or up.shape != gate.shape or up.dtype != gate.dtype:
        return f"up is {tuple(up.shape)} {up.dtype}, the gate {tuple(gate.shape)} {gate.dtype}"
    return None


def _work(tensors: int, flops: int, gate: Tensor, up: Tensor | None = None, *options: Any) -> Work:
    """Count tensors like the gate that are read or written, and FLOPs of an element."""
    numel = gate.numel() // (2 if up is None else 1)
    return Work(flops * numel, tensors * numel * gate.element_size())


def _liger_swiglu() -> Any:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply


def _liger_geglu() -> Any:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    # It has the approximation by tanh alone.
    return LigerGELUMulFunction.apply


SWIGLU = Kernel(
    name="swiglu",
    replaces="silu(gate) * up in the MLPs of Hugging Face's Llama, Qwen, Mistral and Phi-3",
    reference=_swiglu_reference,
    truth=_swiglu_truth,
    providers=(
        Provider(OURS, lambda: swiglu, "kprof"),
        Provider("eager", lambda: _swiglu_reference),
        Provider("inductor", lambda: torch.compile(_swiglu_reference, dynamic=False)),
        Provider("liger", _liger_swiglu, "liger-kernel"),
    ),
    refuses=_refuses,
    inputs=lambda shape, draw: (draw(*shape), draw(*shape)),
    work=partial(_work, 3, 5),
    shapes=((8_192, 8_192), (8_192, 14_336), (16_384, 11_008), (4_096, 28_672)),
    edges=((5, 127), (3, 4_097), (2, 16_384)),
    free=(0, 1),
    reach=(2**20,),
    differentiable=(0, 1),
    backward_work=partial(_work, 5, 11),
    rows=(0, 1),
    sources=(
        "Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202",
        "transformers, LlamaMLP: the order in which it rounds",
    ),
)
GEGLU = replace(
    SWIGLU,
    name="geglu",
    replaces="gelu(gate) * up in the MLPs of Hugging Face's Gemma and T5",
    reference=_geglu_reference,
    truth=_geglu_truth,
    providers=(
        Provider(OURS, lambda: geglu, "kprof"),
        Provider("eager", lambda: _geglu_reference),
        Provider("inductor", lambda: torch.compile(_geglu_reference, dynamic=False)),
        Provider("liger", _liger_geglu, "liger-kernel"),
    ),
    work=partial(_work, 3, 10),
    shapes=((8_192, 8_192), (8_192, 14_336), (8_192, 24_576)),
    backward_work=partial(_work, 5, 20),
    sources=(
        "Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202",
        "transformers, GemmaMLP: the order in which it rounds",
    ),
)
KERNELS = (SWIGLU, GEGLU)
