"""The forward pass of a decoder in plain torch, operator by operator: the prefill, and a reference.

It rounds where the model does. Tests compare each kernel with it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kprof.kernels.decode._model import Decoder, Layer, Weight

Rotations = dict[str | None, tuple[Tensor, Tensor]]
"""Cosines and sines of each type of layer."""

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def normed(x: Tensor, gain: Tensor, decoder: Decoder) -> Tensor:
    """Return the RMS norm of x, rounded as the model does."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + decoder.eps)
    if decoder.adds_one:
        return (wide * (1.0 + gain.to(wide.dtype))).to(x.dtype)
    return gain * wide.to(x.dtype)


def linear(x: Tensor, weight: Weight) -> Tensor:
    """Return x times a weight, with its bias."""
    return functional.linear(x, weight.weight, weight.bias)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (B, H, T, D) with the positions of cos and sin (B, T, D) in it."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def embedded(tokens: Tensor, decoder: Decoder) -> Tensor:
    """Return the embeddings of tokens."""
    return functional.embedding(tokens, decoder.embedding) * decoder.embedding_scale


def mask_of(first: int, count: int, starts: Tensor, window: int | None) -> Tensor:
    """Return which keys (B, 1, T, keys) the tokens from `first` see; each sees at least itself."""
    keys = torch.arange(first + count, device=starts.device)
    queries = keys[first:, None]
    is_seen = (keys <= queries) & (keys >= starts[:, None, None])
    if window is not None:
        is_seen = is_seen & (keys > queries - window)
    return (is_seen | (keys == queries))[:, None]


def forward(
    decoder: Decoder,
    tokens: Tensor,
    keys: Tensor,
    values: Tensor,
    rotations: Rotations,
    *,
    first: int = 0,
    starts: Tensor | None = None,
) -> Tensor:
    """Append tokens (B, T) to the cache from slot `first` on; return the hidden states.

    Args:
        decoder: The model.
        tokens: (B, T).
        keys: The cache, (layers, B, heads, slots, dim); written.
        values: As keys.
        rotations: Cosines and sines of all positions, (slots, dim), by the layers' `rotation`.
        first: The slot of the first token.
        starts: The first slot of each sequence that is not padding, (B,); None: 0.
    """
    batch, count = tokens.shape
    positions = torch.arange(first, first + count, device=tokens.device).expand(batch, -1)
    if starts is not None:
        positions = (positions - starts[:, None]).clamp(min=0)
    chosen = {
        kind: tuple(one[positions].to(decoder.dtype) for one in tables)
        for kind, tables in rotations.items()
    }
    x = embedded(tokens, decoder)
    masks: dict[int | None, Tensor | None] = {}
    for index, layer in enumerate(decoder.layers):
        if layer.window not in masks:
            masks[layer.window] = _mask(first, count, starts, layer.window, tokens)
        cache = keys[index, :, :, : first + count], values[index, :, :, : first + count]
        x = _layer(decoder, layer, x, cache, chosen[layer.rotation], masks[layer.window], first)
    return x


def _mask(
    first: int, count: int, starts: Tensor | None, window: int | None, tokens: Tensor
) -> Tensor | None:
    """Return a mask; None: plain causal attention from slot 0, or a single token that sees all."""
    reaches = window is not None and first + count > window
    if starts is None and not reaches and (first == 0 or count == 1):
        return None
    zeros = tokens.new_zeros(tokens.shape[0]) if starts is None else starts
    return mask_of(first, count, zeros, window)


def _layer(
    decoder: Decoder,
    layer: Layer,
    x: Tensor,
    cache: tuple[Tensor, Tensor],
    rotations: tuple[Tensor, ...],
    mask: Tensor | None,
    first: int,
) -> Tensor:
    batch, count, _ = x.shape
    inputs = normed(x, layer.before_attention, decoder)
    q, k, v = (
        linear(inputs, one).view(batch, count, -1, decoder.dim).transpose(1, 2)
        for one in (layer.q, layer.k, layer.v)
    )
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = normed(q, layer.q_norm, decoder), normed(k, layer.k_norm, decoder)
    q, k = rotated(q, *rotations), rotated(k, *rotations)
    keys, values = cache
    keys[:, :, first:].copy_(k)
    values[:, :, first:].copy_(v)
    if first == 0:
        # Contiguous in tokens, which the cache need not be.
        keys, values = k, v
    y = _attended(decoder, q, keys, values, mask)
    added = linear(y.transpose(1, 2).reshape(batch, count, -1), layer.o)
    x = x + _normed_after(added, layer.after_attention, decoder)
    inputs = normed(x, layer.before_mlp, decoder)
    gate = GATES[decoder.activation](linear(inputs, layer.gate))
    added = linear(gate * linear(inputs, layer.up), layer.down)
    return x + _normed_after(added, layer.after_mlp, decoder)


def _normed_after(x: Tensor, gain: Tensor | None, decoder: Decoder) -> Tensor:
    return x if gain is None else normed(x, gain, decoder)


def capped(x: Tensor, cap: float | None) -> Tensor:
    """Return c tanh(x / c); x without a cap."""
    return x if cap is None else torch.tanh(x / cap) * cap


def _attended(
    decoder: Decoder, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> Tensor:
    count = q.shape[2]
    if decoder.score_cap is None:
        return functional.scaled_dot_product_attention(
            q,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None and count > 1,
            scale=decoder.scale,
            enable_gqa=decoder.group > 1,
        )
    keys, values = (one.repeat_interleave(decoder.group, dim=1) for one in (keys, values))
    scores = capped(q @ keys.transpose(2, 3) * decoder.scale, decoder.score_cap)
    if mask is None:
        is_seen = torch.ones(count, keys.shape[2], dtype=torch.bool, device=q.device)
        mask = is_seen.tril(keys.shape[2] - count)
    scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ values


def logits_of(x: Tensor, decoder: Decoder) -> Tensor:
    """Return the logits of hidden states."""
    return capped(linear(normed(x, decoder.norm, decoder), decoder.head), decoder.logit_cap)
