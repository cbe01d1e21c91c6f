"""Residual add and LayerNorm in one pass: two reads, and the sum and its norm written.

The gradient of the sum joins that of the norm in the same pass of the backward kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kprof.kernels import OURS, Kernel, Provider, Work
from kprof.kernels.norm._norm import norm, why_not, work_of
from kprof.kernels.norm.layernorm import KERNEL as LAYERNORM


def add_layernorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, ...]:
    """Return the LayerNorm of residual + x, and that sum, rounded as the reference rounds it.

    Args:
        x: (..., N): what a block adds; float32, float16 or bfloat16.
        residual: As x.
        weight: (N,), of the same dtype; None: ones.
        bias: (N,), of the same dtype; None: zeros.
        eps: Added to the variance.
    """
    return norm("layer", x, residual, weight, bias, eps)


def _reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    added = residual + x
    return LAYERNORM.reference(added, weight, bias, eps), added


def _truth(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    added = residual + x
    return LAYERNORM.truth(added, weight, bias, eps), added


def _refuses(x: Tensor, residual: Tensor, *parameters: Any) -> str | None:
    if residual.shape != x.shape or residual.dtype != x.dtype:
        return f"a residual {tuple(residual.shape)} {residual.dtype} for {tuple(x.shape)} {x.dtype}"
    return why_not("layer", x, *parameters[:2])


def _work(x: Tensor, residual: Tensor, *parameters: Any) -> Work:
    return work_of(4, 8, x, *parameters[:2])


def _backward_work(x: Tensor, residual: Tensor, *parameters: Any) -> Work:
    return work_of(4, 15, x, *parameters[:2], *parameters[:2])


KERNEL = Kernel(
    name="add_layernorm",
    replaces="a residual add and the torch.nn.LayerNorm after it",
    reference=_reference,
    truth=_truth,
    providers=(
        Provider(OURS, lambda: add_layernorm, "kprof"),
        Provider("eager", lambda: _reference),
        Provider("inductor", lambda: torch.compile(_reference, dynamic=False)),
    ),
    refuses=_refuses,
    inputs=lambda shape, draw: (
        *(draw(*shape), draw(*shape)),
        draw.plain(shape[-1], scale=0.1, shift=1.0),
        draw.plain(shape[-1], scale=0.1),
    ),
    work=_work,
    shapes=LAYERNORM.shapes,
    edges=LAYERNORM.edges,
    reach=(2**19,),
    differentiable=(0, 1, 2, 3),
    backward_work=_backward_work,
    rows=(0, 1),
    sources=("torch.nn.TransformerEncoderLayer: the sum is rounded before it is normalised",),
)
