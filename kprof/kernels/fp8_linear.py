"""A linear layer whose weights are in FP8, quantised once; x is, too, where that is faster.

Gradients are quantised to e4m3 as well: with a scale for each row, the three more binades of e5m2
are not needed, and its one bit less of mantissa would double the error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kprof.kernels import OURS, Kernel, Provider, Work
from kprof.kernels._fp8_linear import Route, forward, run_on, to_input, to_weight
from kprof.kernels._fp8_weights import ByVersion
from kprof.kernels._fp8_weights import forget as forget
from kprof.kernels._operator import applied
from kprof.kernels.fp8_gemm import LLAMA, WIDE
from kprof.kernels.quantize_fp8 import quantize_fp8

# Of the forward pass: two matrices of three bits of mantissa, each rounded to half of the last.
STATED_ERROR = 0.05


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weight' + bias, with the weights in float8_e4m3fn, a scale for each row of them.

    Weights are quantised when a version of theirs is first met. Where gradients of them are
    recorded, that is in every forward pass.

    Args:
        x: (..., K); bfloat16 or float16.
        weight: (N, K), of the same dtype.
        bias: (N,).
    """
    is_recorded = torch.is_grad_enabled()
    is_kept = not (is_recorded and weight.requires_grad)
    if is_recorded and (x.requires_grad or weight.requires_grad or _is_wanted(bias)):
        y: Tensor = _with_gradient(x, weight, bias, is_kept)
    else:
        y = forward(x, weight, bias, is_kept)
    return y


def _is_wanted(bias: Tensor | None) -> bool:
    return bias is not None and bias.requires_grad


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, is_kept: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        y: Tensor = forward(x, weight, bias, is_kept)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (x, weight) = gradients, ctx.saved_tensors
        is_x, is_weight, is_bias, _ = ctx.needs_input_grad
        return (
            to_input(dy, weight) if is_x else None,
            to_weight(dy, x) if is_weight else None,
            dy.reshape(-1, dy.shape[-1]).sum(0) if is_bias else None,
            None,
        )


_with_gradient = applied(_Linear)


def _reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(x, weight, bias)


def _on(route: Route) -> Any:
    """Return the layer on one route, forward alone."""

    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return run_on(x, weight, bias, True, route)

    return call


# Providers that quantise rows of x, which therefore take a twin, and the route of each; None: the
# one that is known as best.
BY_ROWS: dict[str, Route | None] = {OURS: None, f"{OURS}-tiles": "tiles", "scaled-mm": "library"}


def _library() -> Any:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        raise ImportError("a GPU that multiplies FP8")
    return _on("library")


def _torchao() -> Any:
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    config = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
    # What is written in C is not compiled.
    multiply = torch.compile(_reference, dynamic=False)

    def quantize(weight: Tensor) -> Tensor:
        layer = torch.nn.Linear(*reversed(weight.shape), bias=False, device="meta")
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        quantize_(layer, config)
        return layer.weight

    quantized = ByVersion(quantize)

    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        return multiply(x, quantized(weight), bias)

    return call


def _deep_gemm() -> Any:
    from deep_gemm import fp8_gemm_nt

    quantized = ByVersion(lambda weight: quantize_fp8(weight, "128x128"))

    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        y = torch.empty(rows.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
        fp8_gemm_nt(quantize_fp8(rows, "1x128"), quantized(weight), y)
        y = y if bias is None else y + bias
        y = y if y.dtype == x.dtype else y.to(x.dtype)
        return y if x is rows else y.view(*x.shape[:-1], weight.shape[0])

    return call


def _refuses(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> str | None:
    if weight.dim() != 2 or not x.dim() or x.shape[-1] != weight.shape[1]:
        return f"{tuple(x.shape)} by {tuple(weight.shape)}, which are no (..., K) and (N, K)"
    dtypes = {one.dtype for one in (x, weight, bias) if one is not None}
    if x.dtype not in WIDE or len(dtypes) > 1:
        return f"tensors in {', '.join(map(str, dtypes))}: not all in float16, or in bfloat16"
    if not weight.numel():
        return "there are no weights"
    return None


def _work(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Work:
    """Count x and the weights in FP8 read once, and the result written."""
    num_rows = x.numel() // x.shape[-1]
    moved = x.element_size() * (x.numel() + num_rows * weight.shape[0])
    return Work(2 * x.numel() * weight.shape[0], moved + weight.numel())


def _backward_work(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Work:
    """Count both products: what arrives, x and the weights read, two gradients written."""
    arriving = x.numel() // x.shape[-1] * weight.shape[0]
    moved = x.element_size() * (2 * x.numel() + 2 * weight.numel() + arriving)
    return Work(4 * x.numel() * weight.shape[0], moved)


KERNEL = Kernel(
    name="fp8_linear",
    replaces="torch's linear layer, in less precision: its weights in float8_e4m3fn",
    reference=_reference,
    truth=_reference,
    providers=(
        Provider(OURS, lambda: fp8_linear, "kprof", is_varying=True),
        Provider(f"{OURS}-wide", lambda: _on("wide"), "kprof", is_varying=True),
        Provider(f"{OURS}-tiles", lambda: _on("tiles"), "kprof", is_varying=True),
        Provider("eager", lambda: _reference, is_varying=True),
        Provider("scaled-mm", _library, is_varying=True),
        Provider("torchao", _torchao, "torchao", is_varying=True),
        Provider("deep-gemm", _deep_gemm, "sgl-deep-gemm", is_varying=True),
    ),
    refuses=_refuses,
    inputs=lambda shape, draw: (
        draw(shape[0], shape[2]),
        draw.plain(shape[1], shape[2], scale=shape[2] ** -0.5),
    ),
    work=_work,
    backward_work=_backward_work,
    shapes=tuple((m, *shape) for shape in LLAMA for m in (1, 8, 64, 512, 4_096)),
    edges=((5, 48, 80), (130, 64, 256), (4_096, 128, 256)),
    reach=(2**17,),
    dtypes=("bfloat16", "float16"),
    differentiable=(0, 1),
    stated_error=STATED_ERROR,
    constant=(1,),
    exact=2,
    rows=(0,),
    needs_gpu="Triton's interpreter rounds to float8 wrongly",
    sources=(
        "Micikevicius and others, FP8 formats for deep learning, arXiv 2209.05433",
        "PyTorch, Float8 training with scales for rows: e4m3 for gradients, too",
    ),
)
