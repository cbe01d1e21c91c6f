"""Squared ReLU: y = max(x, 0)², elementwise, of any shape.

Forward is one read and one write; backward two reads and one write. A CTA has a block of elements.
Entered by `relu_squared`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kprof.kernels import OURS, Kernel, Provider, Work
from kprof.kernels.runtime import DTYPES, Launcher, alignments, applied, define, kind_of

# Elements of a CTA: four 16-byte loads for each of 128 threads, in 16 bits.
BLOCK, WARPS = 4_096, 4


def relu_squared(x: Tensor) -> Tensor:
    """Return max(x, 0)², rounded once.

    Args:
        x: Of any shape; float32, float16 or bfloat16.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return _with_gradient(x)
    return _operator(x)


def _reference(x: Tensor) -> Tensor:
    """Compute what ReLUSquaredActivation of Hugging Face does."""
    return torch.square(torch.nn.functional.relu(x))


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _operator(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return _operator_backward(dy, *ctx.saved_tensors)


def _launch(launcher: Launcher, *tensors: Tensor) -> None:
    """Launch over all elements of contiguous tensors, the last of which is written."""
    call, size = kind_of(*tensors), tensors[0].numel()
    if launcher.again(call, tensors) or not size:
        return
    # Everything for which Triton compiles another binary.
    key = tensors[0].device, tensors[0].dtype, alignments(tensors, size)
    arguments, options = (*tensors, size, BLOCK), {"num_warps": WARPS}
    launcher(key, -(-size // BLOCK), arguments, options, call=call, tensors=tensors)


def _run_forward(x: Tensor) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    _launch(_launch_forward, x, y)
    return y


def _run_backward(dy: Tensor, x: Tensor) -> Tensor:
    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    _launch(_launch_backward, dy, x, dx)
    return dx


def _empty(*inputs: Tensor) -> Tensor:
    return torch.empty_like(inputs[-1], memory_format=torch.contiguous_format)


def _refuses(x: Tensor) -> str | None:
    return None if x.dtype in DTYPES else f"{x.dtype} is none of float32, float16 and bfloat16"


@triton.jit
def _forward(x_N, y_N, num_elements: tl.int64, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_N + places, places < num_elements).to(tl.float32)
    # Written so that NaN stays NaN.
    y = tl.where(x <= 0, 0.0, x * x)
    tl.store(y_N + places, y.to(y_N.dtype.element_ty), places < num_elements)


@triton.jit
def _backward(dy_N, x_N, dx_N, num_elements: tl.int64, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_N + places, places < num_elements).to(tl.float32)
    dy = tl.load(dy_N + places, places < num_elements).to(tl.float32)
    dx = tl.where(x <= 0, 0.0, 2 * x * dy)
    tl.store(dx_N + places, dx.to(dx_N.dtype.element_ty), places < num_elements)


_launch_forward = Launcher(_forward)
_launch_backward = Launcher(_backward)
_operator = define("relu_squared(Tensor x) -> Tensor", _run_forward, _empty)
_operator_backward = define(
    "relu_squared_backward(Tensor dy, Tensor x) -> Tensor", _run_backward, _empty
)
_with_gradient = applied(_WithGradient)
KERNEL = Kernel(
    name="relu_squared",
    replaces="ReLUSquaredActivation of Hugging Face, as in Nemotron",
    reference=_reference,
    truth=_reference,
    providers=(
        Provider(OURS, lambda: relu_squared, "kprof"),
        Provider("eager", lambda: _reference),
        Provider("inductor", lambda: torch.compile(_reference, dynamic=False)),
    ),
    refuses=_refuses,
    inputs=lambda shape, draw: (draw(*shape),),
    work=lambda x: Work(2 * x.numel(), 2 * x.numel() * x.element_size()),
    shapes=((8_192, 8_192), (8_192, 16_384)),
    edges=((5, 127), (3, 4_097)),
    free=(0, 1),
    reach=(2**20, 2**15),
    differentiable=(0,),
    backward_work=lambda x: Work(3 * x.numel(), 3 * x.numel() * x.element_size()),
    rows=(0,),
    sources=("So et al., Primer: Searching for Efficient Transformers, arXiv 2109.08668",),
)
