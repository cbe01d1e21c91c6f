"""The reference of the attention kernels: torch's own attention, in float64 the mathematics."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = True,
    window: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Return torch's own attention, with a mask where it needs one, as Hugging Face calls it.

    Torch's backends differ for a query that sees no key: here it sees all, and gets 0 afterwards.
    """
    q, k, v = (aligned_for_torch(one) for one in (q, k, v))
    options: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1], "scale": scale}
    is_blind = None
    if _is_masked(q, k, is_causal, window):
        is_seen = _seen(q, k, is_causal, window)
        if q.shape[2] > k.shape[2]:
            is_blind = ~is_seen.any(-1, keepdim=True)
            is_seen |= is_blind
        options["attn_mask"] = is_seen
    elif is_causal:
        options["is_causal"] = True
    y = attention_of_torch(q, k, v, **options)
    if y.requires_grad:
        y.register_hook(partial(_with_strides, y.stride()))
    return y if is_blind is None else y.masked_fill(is_blind, 0.0)


def attention_of_torch(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Return torch's scaled_dot_product_attention, also of empty tensors.

    torch 2.11 chooses cuDNN on an H100, which returns None for a batch without elements.
    """
    is_empty = not (q.numel() and k.numel())
    with sdpa_kernel(SDPBackend.MATH) if is_empty else nullcontext():
        return functional.scaled_dot_product_attention(q, k, v, **options)


def _with_strides(strides: tuple[int, ...], gradient: Tensor) -> Tensor:
    """Return the gradient of a result with these strides, which are the result's.

    torch 2.11 caches a plan of cuDNN's backward pass by the strides of q, k and v, and reads every
    later gradient with the strides of the first one.
    """
    if gradient.stride() == strides:
        return gradient
    return gradient.new_empty_strided(gradient.shape, strides).copy_(gradient)


def aligned_for_torch(x: Tensor) -> Tensor:
    """Return a tensor whose rows begin at multiples of 16 bytes: itself, or a copy.

    Torch's kernels take that for granted; otherwise they end the process's use of the GPU.
    """
    starts = (x.data_ptr(), *(step * x.element_size() for step in x.stride()[:-1]))
    is_aligned = x.stride(-1) == 1 and not any(one % 16 for one in starts)
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)


def _is_masked(q: Tensor, k: Tensor, is_causal: bool, window: int) -> bool:
    """Tell whether torch needs a mask: with a window, or causal with T other than N."""
    most = max(q.shape[2], k.shape[2])
    return 0 < window < most or (is_causal and q.shape[2] != k.shape[2])


def _seen(q: Tensor, k: Tensor, is_causal: bool, window: int) -> Tensor:
    """Return which keys each query sees, (T, N)."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    own = torch.arange(num_queries, device=q.device)[:, None] + num_keys - num_queries
    ahead = torch.arange(num_keys, device=q.device) - own
    is_seen = ahead <= 0 if is_causal else ahead <= num_keys + num_queries
    return is_seen & (ahead.abs() < window) if window else is_seen


def truth(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = True,
    window: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Return the mathematics of attention, on float64: all scores at once."""
    q = q if scale is None else q * (scale * math.sqrt(q.shape[-1]))
    return masked_attention(q, k, v, _seen(q, k, is_causal, window))


def masked_attention(q: Tensor, k: Tensor, v: Tensor, is_seen: Tensor) -> Tensor:
    """Return unfused attention of each query to the keys that it sees; 0 where there are none."""
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~is_seen, -math.inf)
    weights = torch.softmax(scores, -1).masked_fill(~is_seen.any(-1, keepdim=True), 0.0)
    return weights @ v.repeat_interleave(group, 1)
