"""Attention of many queries in FP8, for prefill on Hopper: products at twice the rate.

Less precise than in 16 bits: each head of queries, keys and values gets one scale, and weights are
rounded to FP8 on their way to the values. Scores, their softmax and sums stay in float32. There are
no gradients.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kprof.kernels import OURS, Kernel, Provider, Work
from kprof.kernels._attention_narrow import attend_narrow
from kprof.kernels._attention_ring import why_not_here
from kprof.kernels._operator import DifferentiationError
from kprof.kernels.attention_forward import KERNEL as WIDE
from kprof.kernels.attention_forward import MOST_PLACES

DIMS = (64, 128)
# Of results, where scores spread as much as those of normal queries and keys: see `_inputs`.
STATED_ERROR = 0.08


def attention_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = True,
    window: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return what each query gets of the values, and the log-sum-exp of its scores.

    As `attention_forward`, but that queries, keys and values are rounded to float8_e4m3fn, the
    largest magnitude of each head to 448. An infinity or NaN makes all of its head NaN. Errors of
    weights grow with scores, as those are sums of rounded products.

    Args:
        q: (B, query heads, T, D) in float16 or bfloat16, D 64 or 128.
        k: (B, heads, N, D), as q.
        v: As k.
        scale: Of the scores, above 0; None: 1 / sqrt(D).
        is_causal: Whether a query sees no later key.
        window: How near to its own a key has to be that a query sees, its own counted; 0: all are.

    Raises:
        DifferentiationError: gradients are recorded; there are none.
    """
    if _wants_gradient(q, k, v):
        raise DifferentiationError(
            "attention in FP8 has no gradients", fix="call it within torch.no_grad()"
        )
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    results: tuple[Tensor, Tensor] = attend_narrow(q, k, v, scale, is_causal, window)
    return results


def _wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(one.requires_grad for one in tensors)


def _ours() -> Any:
    why = why_not_here()
    if why:
        raise ImportError(why)

    def call(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True, window: int = 0) -> Tensor:
        return attention_fp8(q, k, v, is_causal=is_causal, window=window)[0]

    return call


def _refuses(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True, window: int = 0
) -> str | None:
    if q.dim() == 4 and q.shape[-1] not in DIMS:
        return f"heads of {q.shape[-1]}, not of {' or '.join(map(str, DIMS))}"
    if _wants_gradient(q, k, v):
        return "gradients are asked for"
    why = WIDE.refuses(q, k, v, is_causal, window)
    if why is None and q.shape[1] + 2 * k.shape[1] > MOST_PLACES:
        why = f"{q.shape[1]} heads and twice {k.shape[1]}: more than a grid has room for"
    return why


def _work(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True, window: int = 0) -> Work:
    """Count the products, and what is read and written as if nothing were written in between."""
    return WIDE.work(q, k, v, is_causal, window)


def _inputs(shape: tuple[int, ...], draw: Any) -> tuple[Any, ...]:
    """Make a call as of `attention_forward`, with queries and keys of the size of normal ones.

    Errors grow with scores, which a stated one has to be for. What is no number makes a head NaN,
    and torch's not always.
    """
    q, k, v, *others = WIDE.inputs(shape, draw)
    q, k, v = (one.where(one.isfinite(), 0) for one in (q, k, v))
    q, k = (
        one / one.float().square().mean().sqrt().clamp(min=1e-3).to(one.dtype) for one in (q, k)
    )
    return q, k, v, *others


KERNEL = Kernel(
    name="attention_fp8",
    replaces="torch's scaled_dot_product_attention, of many queries, in less precision: in FP8",
    reference=WIDE.reference,
    truth=WIDE.truth,
    providers=(
        Provider(OURS, _ours, "kprof"),
        Provider("eager", lambda: WIDE.reference, is_varying=True, repeats=False),
    ),
    refuses=_refuses,
    inputs=_inputs,
    work=_work,
    shapes=(
        *((16_384 // n, 16, 16, n, n, 1, 128) for n in (2_048, 8_192, 16_384)),
        *((2, 16, 16, 8_192, 8_192, 0, 128), (2, 32, 32, 8_192, 8_192, 1, 64)),
        (1, 32, 8, 8_192, 8_192, 1, 128),
    ),
    edges=tuple(shape for shape in WIDE.edges if shape[-1] in DIMS),
    reach=(2**13,),
    dtypes=("bfloat16", "float16"),
    stated_error=STATED_ERROR,
    rows=(0, 1, 2),
    # Hugging Face's function puts the tokens before the heads, contiguous, and so does the swap.
    has_free_strides=True,
    exact=2,
    unmeasured="eager",
    needs_gpu="Gluon has no interpreter",
    sources=(
        "Shah and others, FlashAttention-3, arXiv 2407.08608: values turned over, weights in FP8",
        "DeepSeek-AI, DeepSeek-V3 technical report, arXiv 2412.19437: sums promoted to float32",
    ),
)
