"""Calls of attention: which of them kernels take, and with which arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from kprof.kernels.runtime import next_power_of_two
from kprof.kernels.swap.dispatch import key_of

DECODE_ATTENTION, ATTENTION_FORWARD = "decode_attention", "attention_forward"
ATTENTION_FP8 = "attention_fp8"
# With more tokens it is no longer decoding.
MOST_TOKENS = 8
FEW_TOKENS, MANY_TOKENS = f"{MOST_TOKENS} tokens or fewer", f"more than {MOST_TOKENS} tokens"
Arguments = tuple[Any, ...]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Arguments | str | None:
    """Return the arguments of `decode_attention` for a call of torch's attention."""
    if attn_mask is not None or dropout_p or query.dim() != 4 or key.dim() != 4:
        return None
    tokens, keys = query.shape[2], key.shape[2]
    # The first token sees all keys, or one; the kernel's sees all but those of later tokens.
    is_plain = tokens == keys <= MOST_TOKENS if is_causal else tokens == 1
    if not is_plain or not (enable_gqa or query.shape[1] == key.shape[1]):
        return MANY_TOKENS if tokens > MOST_TOKENS else None
    return (query, key, value, None, 0) if is_own_scale(scale, query) else None


def attend_to_many(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Arguments | str | None:
    """Return the arguments of `attention_forward` for a call of torch's attention."""
    if attn_mask is not None or dropout_p or query.dim() != 4 or key.dim() != 4:
        return None
    if query.shape[2] <= MOST_TOKENS:
        return FEW_TOKENS
    if not (enable_gqa or query.shape[1] == key.shape[1]) or not is_own_scale(scale, query):
        return None
    return many_queries(query, key, value, is_causal)


def many_queries(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Arguments | str:
    """Return the arguments of `attention_forward` for attention of torch's without a mask.

    Torch's first query sees the first key alone, the kernel's last one sees the last key: the same
    where there are no keys that nobody sees.
    """
    tokens, keys = q.shape[2], k.shape[2]
    if not is_causal or tokens == keys:
        return q, k, v, is_causal, 0
    if tokens > keys:
        return "more tokens than keys"
    return q, k[:, :, :tokens], v[:, :, :tokens], True, 0


def as_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what torch's attention computes with: all in autocast's dtype, where that is on.

    There, queries and keys come in float32 from rotary embeddings, and values do not.
    """
    kind = q.device.type
    # On what has no autocast, such as meta, torch raises.
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    q, k, v = (one if one.dtype == torch.float64 else one.to(dtype) for one in (q, k, v))
    return q, k, v


def casting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attention of torch's that is called with what it computes with."""

    def attend_to_cast(query: Tensor, key: Tensor, value: Tensor, *args: Any, **named: Any) -> Any:
        return function(*as_autocast(query, key, value), *args, **named)

    return attend_to_cast


def is_own_scale(scale: float | None, q: Tensor) -> bool:
    """Tell whether scores are scaled as usual."""
    return scale is None or math.isclose(scale, q.shape[-1] ** -0.5)


def attention_key(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, window: int) -> Hashable:
    """Return what the way of a call depends on; a cache grows, and the way stays the same."""
    has_gradient = q.requires_grad or k.requires_grad or v.requires_grad
    cache = (*k.shape[:2], next_power_of_two(k.shape[2]), k.shape[3], v.shape == k.shape)
    return key_of(q, k), cache, v.dtype, type(v), lengths is None, window > 0, has_gradient


def attention_shape(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, window: int
) -> tuple[int, ...]:
    """Return the shape as the bench of attention counts it."""
    return q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3]


def many_key(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, window: int) -> Hashable:
    """Return what the way of a call of `attention_forward` depends on."""
    has_gradient = q.requires_grad or k.requires_grad or v.requires_grad
    return key_of(q, k), k.shape, v.shape, v.dtype, type(v), is_causal, window, has_gradient


def probe_attention(tokens: int) -> Callable[..., Arguments]:
    """Return what draws arguments of torch's attention for so many queries."""
    return lambda draw, dtype: (
        *(draw(2, 3, tokens, 16).to(dtype), draw(2, 3, tokens + 6, 16).to(dtype)),
        draw(2, 3, tokens + 6, 16).to(dtype),
    )
