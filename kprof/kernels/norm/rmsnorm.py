"""RMSNorm of the rows of a matrix: forward in one read and one write, backward in two reads.

A program normalises whole rows, which stay in registers between the sum and the product. The
backward pass walks over the rows with as many programs as fill the GPU, each adding up its share
of the weight's gradient, so that the result does not depend on timing.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from kprof.kernels import OURS, Kernel, Provider, Work
from kprof.kernels.norm._norm import norm, why_not, work_of


def rmsnorm(
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    form: Literal["llama", "torch", "gemma"] = "llama",
) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) * weight over the last dimension.

    Args:
        x: (..., N); float32, float16 or bfloat16.
        weight: (N,), of the same dtype or float32; None: ones.
        eps: Added to the mean of squares.
        form: "llama" rounds to x's dtype before the weight, and multiplies in the wider dtype of
            the two; "torch" rounds once, at the end, as torch and OLMo do; so does "gemma", which
            adds 1 to the weight.
    """
    return norm(form, x, None, weight, None, eps)[0]


def _reference(x: Tensor, weight: Tensor | None, eps: float = 1e-6, form: str = "llama") -> Tensor:
    """Do what the norms of Hugging Face's Llama, OLMo and Gemma do."""
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    if form == "llama":
        return normed.to(x.dtype) if weight is None else weight * normed.to(x.dtype)
    if weight is not None:
        normed = normed * (weight.float() + 1.0 if form == "gemma" else weight)
    return normed.to(x.dtype)


def _truth(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _refuses(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, form: str = "llama"
) -> str | None:
    return why_not(form, x, weight)


def _work(x: Tensor, weight: Tensor | None, eps: float = 1e-6, form: str = "llama") -> Work:
    return work_of(2, 4, x, weight)


def _backward_work(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, form: str = "llama"
) -> Work:
    return work_of(3, 10, x, weight, weight)


def _aten() -> Any:
    return lambda x, weight, eps=1e-6: torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


def _liger() -> Any:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    # Arguments after eps: offset, casting as in Llama, and not in place of dy.
    return lambda x, weight, eps=1e-6: LigerRMSNormFunction.apply(
        x, weight, eps, 0.0, "llama", False
    )


def _quack() -> Any:
    from quack import rmsnorm as quack_rmsnorm

    return lambda x, weight, eps=1e-6: quack_rmsnorm(x, weight, eps=eps)


KERNEL = Kernel(
    name="rmsnorm",
    replaces="the RMSNorm modules of Hugging Face, and torch.nn.RMSNorm",
    reference=_reference,
    truth=_truth,
    providers=(
        Provider(OURS, lambda: rmsnorm, "kprof"),
        Provider("eager", lambda: _reference),
        Provider("inductor", lambda: torch.compile(_reference, dynamic=False)),
        Provider("aten", _aten),
        Provider("liger", _liger, "liger-kernel"),
        Provider("quack", _quack, "quack-kernels"),
    ),
    refuses=_refuses,
    inputs=lambda shape, draw: (draw(*shape), draw.plain(shape[-1], scale=0.1, shift=1.0)),
    work=_work,
    shapes=tuple((m, n) for m in (8_192, 32_768) for n in (2_048, 4_096, 8_192, 16_384)),
    edges=((5, 127), (3, 4_097), (2, 16_384)),
    free=(0, 1),
    reach=(2**20,),
    differentiable=(0, 1),
    backward_work=_backward_work,
    rows=(0,),
    sources=(
        "Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv 1910.07467",
        "transformers, LlamaRMSNorm, Olmo2RMSNorm and GemmaRMSNorm: the order in which they round",
    ),
)
