"""Attention of a few new tokens to a long KV cache, in one launch.

y = softmax(scale * q k') v for the last T tokens: q is (B, query heads, T, D), the cache (B, heads,
N, D), or pages that a table orders. `decode_attention` is the public function; kernel, schedule and
launch are in `_kernel`. The query heads of a key head are the rows of one tile, so the cache is
read once. A sequence is split among as many CTAs as fill the GPU; the last one to finish merges the
splits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kprof.kernels import OURS, Kernel, Provider, Work
from kprof.kernels.attention._reference import (
    aligned_for_torch,
    attention_of_torch,
    masked_attention,
)
from kprof.kernels.decode_attention._kernel import decode_operator, why_refused
from kprof.kernels.runtime import needs_gradient, refuse_gradients


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None = None,
    table: Tensor | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = True,
    window: int = 0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    is_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return y, the weighted mean of the cached values for each token, and the log-sum-exp.

    A token that sees no key gets 0 and -inf.

    Args:
        q: (B, query heads, T, D): the last T tokens of each sequence; float16 or bfloat16.
        k: (B, heads, N, D), or in pages: (pages, heads, keys of a page, D); q's dtype or e4m3.
        v: As k.
        lengths: (B,) of integers, the keys of each sequence; None: N.
        table: (B, most pages) of integers, each sequence's pages in order; None: k is contiguous.
        scale: Of the scores; None: 1 / sqrt(D).
        is_causal: Whether a token sees no later one: the last one sees all keys, the one before it
            one less.
        window: Most keys that a token sees, its own the last of them; 0: all.
        k_scale: Scale of keys in e4m3: one, one for each head, or (B, heads).
        v_scale: As k_scale, of values.
        is_invariant: Whether a sequence gets the same bits in every batch, which costs some time.

    Raises:
        KprofError: shapes or dtypes that it does not take.
        DifferentiationError: gradients are recorded; there are none.
    """
    refuse_gradients("decode attention", q, k, v)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    options = (scale, is_causal, window, is_invariant)
    results: tuple[Tensor, Tensor] = decode_operator(
        q, k, v, lengths, table, k_scale, v_scale, *options
    )
    return results


def _ours(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None, window: int = 0
) -> Tensor:
    return decode_attention(q, k, v, lengths, window=window)[0]


def _invariant(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None, window: int = 0
) -> Tensor:
    return decode_attention(q, k, v, lengths, window=window, is_invariant=True)[0]


def _reference(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None, window: int = 0
) -> Tensor:
    """Return torch's own attention, with a mask where it needs one, as Hugging Face calls it.

    Torch's backends differ for a token that sees no key: here it sees all, and gets 0 afterwards.
    """
    q, k, v = (aligned_for_torch(one) for one in (q, k, v))
    is_plain = lengths is None and q.shape[2] == 1 and (not window or window >= k.shape[2])
    is_seen = None if is_plain else _seen(q, k, lengths, window)
    is_blind = None
    if is_seen is not None and (lengths is not None or q.shape[2] > k.shape[2]):
        is_blind = ~is_seen.any(-1, keepdim=True)
        is_seen |= is_blind
    y = attention_of_torch(q, k, v, attn_mask=is_seen, enable_gqa=True)
    return y if is_blind is None else y.masked_fill(is_blind, 0.0)


def _seen(q: Tensor, k: Tensor, lengths: Tensor | None, window: int) -> Tensor:
    """Return which keys each token sees, (B or 1, 1, T, N)."""
    num_tokens, num_keys = q.shape[2], k.shape[2]
    if lengths is None:
        lengths = torch.full((1,), num_keys, device=q.device)
    token = torch.arange(num_tokens, device=q.device)[:, None]
    end = lengths[:, None, None] - num_tokens + 1 + token
    key = torch.arange(num_keys, device=q.device)
    is_seen = key < end
    if window:
        is_seen &= key >= end - window
    return is_seen[:, None]


def _truth(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None, window: int = 0
) -> Tensor:
    is_seen = _seen(q, k, None if lengths is None else lengths.long(), window)
    return masked_attention(q, k, v, is_seen)


def _refuses(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None, window: int = 0
) -> str | None:
    if needs_gradient(q, k, v):
        return "gradients are asked for"
    return why_refused(q, k, v, lengths)


def _work(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None, window: int = 0) -> Work:
    num_keys = min(k.shape[2], window) if window else k.shape[2]
    read = 2 * k.shape[0] * k.shape[1] * num_keys * k.shape[3] * k.element_size()
    return Work(4 * q.numel() * num_keys, read + 2 * q.numel() * q.element_size())


def _flash_3() -> Any:
    from fa3_fwd_interface import flash_attn_with_kvcache

    def call(
        q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None, window: int = 0
    ) -> Any:
        if window:
            raise NotImplementedError("windows")
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        y = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True)
        return y.transpose(1, 2)

    return call


def _flashinfer() -> Any:
    from flashinfer import single_decode_with_kv_cache

    def call(
        q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None, window: int = 0
    ) -> Any:
        if q.shape[0] != 1 or q.shape[2] != 1 or lengths is not None:
            raise NotImplementedError("more than one sequence or token: needs a plan of its own")
        options: dict[str, Any] = {"kv_layout": "HND", "window_left": window - 1}
        y = single_decode_with_kv_cache(q[0, :, 0], k[0], v[0], use_tensor_cores=True, **options)
        return y[None, :, None]

    return call


def _inputs(shape: tuple[int, ...], draw: Any) -> tuple[Any, ...]:
    """Make a call of (B, query heads, heads, T, N, D), or with a window as a seventh number.

    With a window, the sequences' lengths differ, and the last one is empty.
    """
    batch, query_heads, heads, tokens, keys, dim, *window = shape
    q = draw(batch, query_heads, tokens, dim)
    k, v = (draw(batch, heads, keys, dim) for _ in range(2))
    if not window:
        return q, k, v
    lengths = draw.integers(keys, batch) + 1
    lengths[-1:] = 0
    # The reference turns an infinity behind a mask into NaN.
    q, k, v = (one.where(one.isfinite(), 0) for one in (q, k, v))
    return q, k, v, lengths, *window


KERNEL = Kernel(
    name="decode_attention",
    replaces="torch's scaled_dot_product_attention, of a few tokens over a cache",
    reference=_reference,
    truth=_truth,
    providers=(
        Provider(OURS, lambda: _ours, "kprof", is_varying=True),
        Provider(f"{OURS}-invariant", lambda: _invariant, "kprof"),
        Provider("eager", lambda: _reference, is_varying=True),
        Provider("flash-attn-3", _flash_3, "fa3-fwd", is_varying=True),
        Provider("flashinfer", _flashinfer, "flashinfer-python", is_varying=True),
    ),
    refuses=_refuses,
    inputs=_inputs,
    work=_work,
    shapes=(
        *((1, 32, 8, 1, n, 128) for n in (1_024, 4_096, 16_384, 131_072)),
        *((8, 32, 8, 1, 4_096, 128), (32, 32, 8, 1, 4_096, 128), (128, 32, 8, 1, 2_048, 128)),
    ),
    edges=((3, 8, 2, 1, 300, 64), (3, 4, 1, 3, 70, 128, 50), (2, 2, 2, 4, 3, 64, 99)),
    reach=(2**11,),
    dtypes=("bfloat16", "float16"),
    rows=(0, 1, 2, 3),
    sources=(
        "Dao and others, Flash-Decoding for long-context inference: keys split among programs",
        "Milakov and Gimelshein, Online normalizer calculation, arXiv 1805.02867",
    ),
)
