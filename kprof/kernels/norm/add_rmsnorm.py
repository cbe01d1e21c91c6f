"""Residual add and RMSNorm in one pass: two reads, and the sum and its norm written.

The gradient of the sum joins that of the norm in the same pass of the backward kernel.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from kprof.kernels import OURS, Kernel, Provider, Work
from kprof.kernels.norm._norm import norm, why_not, work_of
from kprof.kernels.norm.rmsnorm import KERNEL as RMSNORM


def add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    form: Literal["llama", "torch", "gemma"] = "llama",
) -> tuple[Tensor, ...]:
    """Return the RMSNorm of residual + x, and that sum, rounded as the reference rounds it.

    Args:
        x: (..., N): what a block adds; float32, float16 or bfloat16.
        residual: As x.
        weight: (N,), of the same dtype or float32; None: ones.
        eps: Added to the mean of squares.
        form: As of `rmsnorm`.
    """
    return norm(form, x, residual, weight, None, eps)


def _reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float = 1e-6, form: str = "llama"
) -> tuple[Tensor, Tensor]:
    """Do what a decoder layer of Hugging Face does between two blocks."""
    added = residual + x
    return RMSNORM.reference(added, weight, eps, form), added


def _truth(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    added = residual + x
    return RMSNORM.truth(added, weight, eps), added


def _refuses(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float = 1e-6, form: str = "llama"
) -> str | None:
    if residual.shape != x.shape or residual.dtype != x.dtype:
        return f"a residual {tuple(residual.shape)} {residual.dtype} for {tuple(x.shape)} {x.dtype}"
    return why_not(form, x, weight)


def _work(x: Tensor, residual: Tensor, weight: Tensor | None, *options: Any) -> Work:
    return work_of(4, 5, x, weight)


def _backward_work(x: Tensor, residual: Tensor, weight: Tensor | None, *options: Any) -> Work:
    return work_of(4, 11, x, weight, weight)


def _aten() -> Any:
    def add_then_norm(x, residual, weight, eps=1e-6):
        added = residual + x
        return torch.nn.functional.rms_norm(added, x.shape[-1:], weight, eps), added

    return add_then_norm


def _liger() -> Any:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    # Arguments after eps: offset, casting as in Llama, and not in place of dy.
    return lambda x, residual, weight, eps=1e-6: LigerFusedAddRMSNormFunction.apply(
        x, residual, weight, eps, 0.0, "llama", False
    )


def _quack() -> Any:
    from quack import rmsnorm as quack_rmsnorm

    return lambda x, residual, weight, eps=1e-6: quack_rmsnorm(
        x, weight, residual=residual, eps=eps, prenorm=True
    )


KERNEL = Kernel(
    name="add_rmsnorm",
    replaces="a residual add and the RMSNorm after it, as in the decoder layers of Hugging Face",
    reference=_reference,
    truth=_truth,
    providers=(
        Provider(OURS, lambda: add_rmsnorm, "kprof"),
        Provider("eager", lambda: _reference),
        Provider("inductor", lambda: torch.compile(_reference, dynamic=False)),
        Provider("aten", _aten),
        Provider("liger", _liger, "liger-kernel"),
        Provider("quack", _quack, "quack-kernels"),
    ),
    refuses=_refuses,
    inputs=lambda shape, draw: (
        *(draw(*shape), draw(*shape)),
        draw.plain(shape[-1], scale=0.1, shift=1.0),
    ),
    work=_work,
    shapes=RMSNORM.shapes,
    edges=RMSNORM.edges,
    free=(0, 1),
    reach=(2**20,),
    differentiable=(0, 1, 2),
    backward_work=_backward_work,
    rows=(0, 1),
    sources=("transformers, LlamaDecoderLayer: the sum is rounded before it is normalised",),
)
