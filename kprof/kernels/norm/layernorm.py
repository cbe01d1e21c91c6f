"""LayerNorm of the rows of a matrix: forward in one read and one write, backward in two reads.

Mean and variance are taken in two passes over a row that stays in registers: no cancellation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kprof.kernels import OURS, Kernel, Provider, Work
from kprof.kernels.norm._norm import norm, why_not, work_of


def layernorm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Return (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension.

    It rounds once, at the end, as torch.nn.LayerNorm does.

    Args:
        x: (..., N); float32, float16 or bfloat16.
        weight: (N,), of the same dtype; None: ones.
        bias: (N,), of the same dtype; None: zeros.
        eps: Added to the variance.
    """
    return norm("layer", x, None, weight, bias, eps)[0]


def _reference(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _truth(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps) * weight + bias


def _refuses(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> str | None:
    return why_not("layer", x, weight, bias)


def _work(x: Tensor, *parameters: Any) -> Work:
    return work_of(2, 7, x, *parameters[:2])


def _backward_work(x: Tensor, *parameters: Any) -> Work:
    return work_of(3, 14, x, *parameters[:2], *parameters[:2])


def _liger() -> Any:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return lambda x, weight, bias, eps=1e-5: LigerLayerNormFunction.apply(x, weight, bias, eps)


KERNEL = Kernel(
    name="layernorm",
    replaces="torch.nn.LayerNorm over the last dimension",
    reference=_reference,
    truth=_truth,
    providers=(
        Provider(OURS, lambda: layernorm, "kprof"),
        Provider("aten", lambda: _reference),
        Provider("inductor", lambda: torch.compile(_reference, dynamic=False)),
        Provider("liger", _liger, "liger-kernel"),
    ),
    refuses=_refuses,
    inputs=lambda shape, draw: (
        draw(*shape),
        draw.plain(shape[-1], scale=0.1, shift=1.0),
        draw.plain(shape[-1], scale=0.1),
    ),
    work=_work,
    shapes=tuple((m, n) for m in (8_192, 32_768) for n in (1_024, 4_096, 8_192)),
    edges=((5, 127), (3, 4_097), (2, 8_192)),
    reach=(2**19,),
    differentiable=(0, 1, 2),
    backward_work=_backward_work,
    rows=(0,),
    sources=("Ba, Kiros and Hinton, Layer Normalization, arXiv 1607.06450",),
)
