"""Work of scaled dot-product attention.

Both products count, 2 · (d_qk + d_v) FLOPs for every pair of a query and a key; the softmax
between them does not. A causal mask needs only the pairs it keeps, counted as half the square; old
recorders do not tell whether there is one, so that half the square is the least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from kprof.analyze.work import Bound, Inputs, Model, Tensor, Work


@dataclass(frozen=True)
class Layout:
    """Positions of an attention operator's arguments, and of dimensions in its tensors."""

    causal: int
    """The argument that tells whether the mask is causal."""
    query: int = 0
    """The query; key and value follow it."""
    bias: int | None = None
    window: int | None = None
    """The argument that tells how many keys before its own a query sees; negative: all."""
    is_heads_first: bool = True
    """Whether tensors are (batch, heads, positions, size) or (batch, positions, heads, size)."""


@dataclass(frozen=True)
class Call:
    """Tensors of one attention call, and how many (query, key) pairs it needs."""

    query: Tensor
    key: Tensor
    value: Tensor
    num_rows: int
    """Query positions times heads times batch."""
    num_pairs: int
    """Pairs of a query and a key, of all heads of all sequences."""
    bias_bytes: int
    bound: Bound | None

    @property
    def flops(self) -> int:
        """FLOPs of the forward operation."""
        return 2 * self.num_pairs * (self.query.shape[3] + self.value.shape[3])

    @property
    def out_bytes(self) -> int:
        """Bytes of the result."""
        return math.ceil(self.num_rows * self.value.shape[3] * self.query.element_bytes)

    @property
    def read_bytes(self) -> int:
        """Bytes of query, key, value and bias."""
        return self.query.bytes + self.key.bytes + self.value.bytes + self.bias_bytes


def kept_pairs(queries: int, keys: int) -> int:
    """Return how many (query, key) pairs a causal mask keeps, counted as half of the square.

    With more keys than queries (the new tokens of a decoder) a query sees all keys but those
    after it.
    """
    if keys > queries:
        return queries * (keys - queries) + queries * queries // 2
    return queries * keys // 2


def _read(inputs: Inputs, layout: Layout) -> Call | None:
    """Return the call, or None where a tensor is missing or has other dimensions."""
    query, key, value = (inputs.tensor(layout.query + i) for i in range(3))
    if query is None or key is None or value is None:
        return None
    if not len(query.shape) == len(key.shape) == len(value.shape) == 4:
        return None
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return None  # Keys in pages of a cache, whose first dimension is no batch.
    heads, positions = (1, 2) if layout.is_heads_first else (2, 1)
    queries, keys = query.shape[positions], key.shape[positions]
    is_causal = inputs.value(layout.causal)
    num_pairs = (
        queries * keys if is_causal is False or is_causal == 0 else kept_pairs(queries, keys)
    )
    window = inputs.value(layout.window) if layout.window is not None else None
    if isinstance(window, int) and 0 <= window < keys:
        num_pairs = min(num_pairs, queries * (window + 1))
    num_heads = query.shape[0] * query.shape[heads]
    bias = inputs.tensor(layout.bias) if layout.bias is not None else None
    return Call(
        query=query,
        key=key,
        value=value,
        num_rows=num_heads * queries,
        num_pairs=num_heads * num_pairs,
        bias_bytes=bias.bytes if bias is not None else 0,
        bound="at least" if is_causal is None else None,
    )


def forward(inputs: Inputs, layout: Layout) -> Work | None:
    """Model the forward operation: q, k, v read, the result and its row sums (fp32) written."""
    call = _read(inputs, layout)
    if call is None:
        return None
    moved = call.read_bytes + call.out_bytes + 4 * call.num_rows
    return Work(call.flops, moved, call.query.dtype, call.bound)


def backward(inputs: Inputs, layout: Layout) -> Work | None:
    """Model the backward operation: four products, twice the FLOPs of the two forward ones.

    That most kernels compute the scores a second time is not work: it saves memory. Read are
    the gradient, q, k, v, the result and its row sums; written the gradients of q, k and v.
    """
    call = _read(inputs, layout)
    if call is None:
        return None
    read = call.read_bytes + 2 * call.out_bytes + 4 * call.num_rows
    written = call.query.written_as() + call.key.written_as() + call.value.written_as()
    return Work(2 * call.flops, read + written, call.query.dtype, call.bound)


_FORWARD = {
    "aten::scaled_dot_product_attention": Layout(causal=5, bias=3),
    "aten::_scaled_dot_product_flash_attention": Layout(causal=4),
    "aten::_scaled_dot_product_flash_attention_for_cpu": Layout(causal=4, bias=5),
    "aten::_scaled_dot_product_efficient_attention": Layout(causal=6, bias=3),
    "aten::_scaled_dot_product_cudnn_attention": Layout(causal=6, bias=3),
    "aten::_scaled_dot_product_fused_attention_overrideable": Layout(causal=5, bias=3),
    "flash_attn::_flash_attn_forward": Layout(causal=5, window=6, is_heads_first=False),
}

_BACKWARD = {
    "aten::_scaled_dot_product_flash_attention_backward": Layout(causal=11, query=1),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": Layout(7, query=1, bias=8),
    "aten::_scaled_dot_product_efficient_attention_backward": Layout(11, query=1, bias=4),
    "aten::_scaled_dot_product_cudnn_attention_backward": Layout(14, query=1, bias=8),
    "flash_attn::_flash_attn_backward": Layout(11, query=1, window=12, is_heads_first=False),
}

MODELS: dict[str, Model] = {
    **{name: partial(forward, layout=layout) for name, layout in _FORWARD.items()},
    **{name: partial(backward, layout=layout) for name, layout in _BACKWARD.items()},
}
