"""Work of attention over sequences of different lengths, packed together or kept in pages.

The lengths of the sequences are values of a tensor, which are not recorded. Bytes do not depend on
them. FLOPs are exact where all sequences must be as long as the longest. Otherwise they are a
minimum, that of equal lengths, whose sum of squares is smallest; with keys in pages, the minimum
for each query to see itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from kprof.analyze.work import Bound, Inputs, Model, Tensor, Work, at_least
from kprof.analyze.work.attention import Layout, backward, forward, kept_pairs


@dataclass(frozen=True)
class Packing:
    """Positions of the arguments of attention over packed sequences."""

    starts: int
    """Where queries of each sequence begin; where keys do comes next."""
    longest: int
    """How many queries the longest sequence has; how many keys comes next."""
    causal: int
    query: int = 0
    """The query; key and value follow it."""
    window: int | None = None
    """The argument that tells how many keys before its own a query sees; negative: all."""


@dataclass(frozen=True)
class _Call:
    """Tensors of a call, (positions, heads, size) each, and the pairs of a query and a key."""

    query: Tensor
    key: Tensor
    value: Tensor
    num_pairs: int
    bound: Bound | None

    @property
    def flops(self) -> int:
        """FLOPs of the forward operation."""
        return 2 * self.num_pairs * (self.query.shape[2] + self.value.shape[2])

    @property
    def read_bytes(self) -> int:
        """Bytes of query, key and value."""
        return self.query.bytes + self.key.bytes + self.value.bytes

    @property
    def out_bytes(self) -> int:
        """Bytes of the result."""
        num_out = self.query.shape[0] * self.query.shape[1] * self.value.shape[2]
        return math.ceil(num_out * self.query.element_bytes)

    @property
    def row_sum_bytes(self) -> int:
        """Bytes of a number for each query and head, kept for the backward operation."""
        return 4 * self.query.shape[0] * self.query.shape[1]


def count_pairs(
    totals: tuple[int, int], longest: tuple[int, int] | None, num_sequences: int, *, is_causal: bool
) -> tuple[int, Bound | None]:
    """Return how many pairs one head of packed sequences needs, and whether that is a bound.

    `totals` and `longest` are of queries and keys; as many keys as queries in both are taken to
    be those of the same sequences.
    """
    queries, keys = totals
    if longest is None and num_sequences == 1:
        longest = totals
    if longest is not None and totals == tuple(num_sequences * n for n in longest):
        each = kept_pairs(*longest) if is_causal else longest[0] * longest[1]
        return num_sequences * each, None
    if queries == keys and (longest is None or longest[0] == longest[1]):
        squares = math.ceil(queries * queries / num_sequences)
        return (squares // 2 if is_causal else squares), "at least"
    return queries, "at least"


def _read(inputs: Inputs, packing: Packing) -> _Call | None:
    """Return the call, or None where a tensor is missing or sequences are not packed."""
    first = packing.query
    given = [_without_batch(inputs.tensor(first + i)) for i in range(3)]
    starts = inputs.tensor(packing.starts)
    query, key, value = given
    if query is None or key is None or value is None or starts is None or starts.numel < 2:
        return None
    queries, keys = (inputs.value(packing.longest + i) for i in range(2))
    longest = (queries, keys) if isinstance(queries, int) and isinstance(keys, int) else None
    num_pairs, bound = count_pairs(
        (query.shape[0], key.shape[0]),
        longest,
        starts.numel - 1,
        is_causal=inputs.value(packing.causal) is not False and inputs.value(packing.causal) != 0,
    )
    window = inputs.value(packing.window) if packing.window is not None else None
    if isinstance(window, int) and window >= 0:
        num_pairs, bound = query.shape[0], "at least"
    return _Call(query, key, value, query.shape[1] * num_pairs, bound)


def _without_batch(tensor: Tensor | None) -> Tensor | None:
    """Return (positions, heads, size), also where a dimension of one batch comes first."""
    if tensor is not None and len(tensor.shape) == 4 and tensor.shape[0] == 1:
        return Tensor(tensor.shape[1:], tensor.dtype)
    return tensor if tensor is not None and len(tensor.shape) == 3 else None


def _forward(inputs: Inputs, packing: Packing, dense: Layout | None = None) -> Work | None:
    """Model the forward operation: as that of dense tensors, with the pairs of each sequence."""
    call = _read(inputs, packing)
    if call is None:
        return forward(inputs, dense) if dense is not None else None
    moved = call.read_bytes + call.out_bytes + call.row_sum_bytes
    return Work(call.flops, moved, call.query.dtype, call.bound)


def _backward(inputs: Inputs, packing: Packing, dense: Layout | None = None) -> Work | None:
    """Model the backward operation, likewise."""
    call = _read(inputs, packing)
    if call is None:
        return backward(inputs, dense) if dense is not None else None
    read = call.read_bytes + 2 * call.out_bytes + call.row_sum_bytes
    written = call.query.written_as() + call.key.written_as() + call.value.written_as()
    return Work(2 * call.flops, read + written, call.query.dtype, call.bound)


def _from_cache(
    inputs: Inputs, query: int = 0, tensors: tuple[int, ...] = (0, 1, 2, 3)
) -> Work | None:
    """Model attention to keys in a cache: at least its tensors, and each query sees itself."""
    asked = inputs.tensor(query)
    given = [inputs.tensor(i) for i in tensors]
    known = [t for t in given if t is not None]
    if asked is None or len(known) < len(given):
        return None
    return at_least(Work(4 * asked.numel, sum(t.bytes for t in known), asked.dtype))


def _from_pages(inputs: Inputs, packing: Packing, out: int) -> Work | None:
    """Model packed queries, whose keys are packed too or stand in pages of a cache."""
    work = _forward(inputs, packing)
    return work if work is not None else _from_cache(inputs, tensors=(0, out))


def _third(inputs: Inputs) -> Work | None:
    """Model the third generation of flash attention: dense, packed, or to a cache.

    Lengths of the keys in use, or pages, tell that keys stand in a cache.
    """
    lengths, pages = inputs.tensor(11), inputs.tensor(14)
    if lengths is not None or pages is not None:
        return _from_cache(inputs, tensors=(0, 0))
    dense = Layout(causal=24, window=25, is_heads_first=False)
    return _forward(inputs, Packing(starts=7, longest=12, causal=24, window=25), dense)


def _latent(inputs: Inputs, result: int | None = None) -> Work | None:
    """Model attention to a compressed cache: at least the query, the new latent and the result."""
    given = [inputs.tensor(i) for i in (0, 1, 2, *([] if result is None else [result]))]
    known = [t for t in given if t is not None]
    return at_least(Work(None, sum(t.bytes for t in known))) if len(known) == len(given) else None


_FLASH = Layout(causal=8, window=11, is_heads_first=False)
_EFFICIENT = Layout(causal=9, bias=3, is_heads_first=False)
_FLASH_BACKWARD = Layout(11, query=1, window=15, is_heads_first=False)
_EFFICIENT_BACKWARD = Layout(14, query=1, bias=4, is_heads_first=False)

MODELS: dict[str, Model] = {
    "aten::_flash_attention_forward": partial(
        _forward, packing=Packing(starts=3, longest=5, causal=8, window=11), dense=_FLASH
    ),
    "aten::_efficient_attention_forward": partial(
        _forward, packing=Packing(starts=4, longest=6, causal=9), dense=_EFFICIENT
    ),
    "aten::_cudnn_attention_forward": partial(
        _forward, packing=Packing(starts=4, longest=6, causal=10), dense=Layout(10, bias=3)
    ),
    "aten::_cudnn_attention_backward": partial(
        _backward,
        packing=Packing(starts=9, longest=11, causal=14, query=1),
        dense=Layout(14, query=1, bias=8),
    ),
    "flash_attn_3::fwd": _third,
    "_vllm_fa3_C::fwd": _third,
    "sgl_kernel::fwd": _third,
    "flash_attn::_flash_attn_varlen_forward": partial(
        _forward, packing=Packing(starts=3, longest=5, causal=9, window=10)
    ),
    "aten::_flash_attention_backward": partial(
        _backward,
        packing=Packing(starts=6, longest=8, causal=11, query=1, window=15),
        dense=_FLASH_BACKWARD,
    ),
    "aten::_efficient_attention_backward": partial(
        _backward,
        packing=Packing(starts=6, longest=8, causal=14, query=1),
        dense=_EFFICIENT_BACKWARD,
    ),
    "flash_attn::_flash_attn_varlen_backward": partial(
        _backward, packing=Packing(starts=9, longest=11, causal=15, query=1, window=16)
    ),
    "_vllm_fa2_C::varlen_fwd": partial(
        _from_pages, packing=Packing(starts=4, longest=10, causal=15, window=16), out=3
    ),
    "vllm::unified_attention": partial(_from_cache, tensors=(0, 1, 2, 0)),
    "vllm::unified_attention_with_output": _from_cache,
    "sglang::unified_attention_with_output": _from_cache,
    "_C::paged_attention_v1": partial(_from_cache, query=1, tensors=(0, 1)),
    "_C::paged_attention_v2": partial(_from_cache, query=4, tensors=(0, 4)),
    "_rocm_C::paged_attention": partial(_from_cache, query=4, tensors=(0, 4)),
    "vllm::unified_mla_attention": _latent,
    "vllm::unified_mla_attention_with_output": partial(_latent, result=3),
}
