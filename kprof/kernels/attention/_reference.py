"""What attention of many queries replaces: torch's own, and the mathematics of it."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel


def reference(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True, window: int = 0) -> Tensor:
    """Do as Hugging Face does: torch's own attention, with a mask where it needs one.

    Of a query that sees nothing, each of torch's ways makes something else: it is let see all, and
    gets 0 afterwards.
    """
    q, k, v = (_as_torch_reads(one) for one in (q, k, v))
    options: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1]}
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
        y.register_hook(partial(_lying_so, y.stride()))
    return y if is_blind is None else y.masked_fill(is_blind, 0.0)


def attention_of_torch(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Return torch's scaled_dot_product_attention; of nothing, too, where its cuDNN returns None.

    torch 2.11 chooses cuDNN on an H100, which gives no tensor for a batch without elements.
    """
    is_empty = not (q.numel() and k.numel())
    with sdpa_kernel(SDPBackend.MATH) if is_empty else nullcontext():
        return functional.scaled_dot_product_attention(q, k, v, **options)


def _lying_so(steps: tuple[int, ...], gradient: Tensor) -> Tensor:
    """Return the gradient of results in the order in memory that these have.

    torch 2.11 keeps a plan of cuDNN's backward pass by how queries, keys and values lie, and reads
    whatever arrives later as it lay the first time.
    """
    if gradient.stride() == steps:
        return gradient
    return gradient.new_empty_strided(gradient.shape, steps).copy_(gradient)


def _as_torch_reads(x: Tensor) -> Tensor:
    """Return a tensor whose rows begin at multiples of 16 bytes, as torch's kernels expect."""
    starts = (x.data_ptr(), *(step * x.element_size() for step in x.stride()[:-1]))
    is_aligned = x.stride(-1) == 1 and not any(one % 16 for one in starts)
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)


def _is_masked(q: Tensor, k: Tensor, is_causal: bool, window: int) -> bool:
    """Tell whether torch takes a mask for this: not where all is seen, or all that is earlier."""
    most = max(q.shape[2], k.shape[2])
    return 0 < window < most or (is_causal and q.shape[2] != k.shape[2])


def _seen(q: Tensor, k: Tensor, is_causal: bool, window: int) -> Tensor:
    """Return which keys each query sees, (T, N)."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    own = torch.arange(num_queries, device=q.device)[:, None] + num_keys - num_queries
    ahead = torch.arange(num_keys, device=q.device) - own
    is_seen = ahead <= 0 if is_causal else ahead <= num_keys + num_queries
    return is_seen & (ahead.abs() < window) if window else is_seen


def truth(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True, window: int = 0) -> Tensor:
    """Return the mathematics of attention, on float64: all scores at once."""
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) / math.sqrt(q.shape[-1])
    is_seen = _seen(q, k, is_causal, window)
    scores = scores.masked_fill(~is_seen, -math.inf)
    # A query that sees nothing has the mean of nothing, which is 0.
    weights = torch.softmax(scores, -1).masked_fill(~is_seen.any(-1, keepdim=True), 0.0)
    return weights @ v.repeat_interleave(group, 1)
