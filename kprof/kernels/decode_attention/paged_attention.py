"""Decode attention over a paged cache, in 16 bits or FP8, as serving engines keep it.

The call is `decode_attention` with a page table, and with scales for FP8. It is a kernel of its own
for the correctness gate and the benchmarks: it replaces a gather of the pages and attention.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kprof.kernels import OURS, Kernel, Provider, Work
from kprof.kernels.decode_attention import decode_attention as whole
from kprof.kernels.decode_attention._kernel import why_refused
from kprof.kernels.fp8.quantize_fp8 import FP8, LARGEST
from kprof.kernels.runtime import needs_gradient

# The last two numbers of a shape: the window in keys, 0: none; whether the cache is FP8.
PLAIN = (0, 0)
IN_FP8 = (0, 1)


def _ours(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    table: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    window: int = 0,
    *,
    is_invariant: bool = False,
) -> Tensor:
    options: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale, "window": window}
    return whole.decode_attention(q, k, v, lengths, table, is_invariant=is_invariant, **options)[0]


def _gathered(
    attend: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    table: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    window: int = 0,
) -> Tensor:
    """Gather each sequence's pages in q's dtype, and attend to the contiguous cache."""
    keys, values = (_in_order(*one, table, q) for one in ((k, k_scale), (v, v_scale)))
    y: Tensor = attend(q, keys, values, lengths, window)
    return y


def _in_order(pages: Tensor, scale: Tensor | None, table: Tensor, q: Tensor) -> Tensor:
    """Return (B, heads, keys, D) in q's dtype; `scale` is one for each head."""
    _, heads, size, dim = pages.shape
    # Torch has no gather for FP8, so its pages are gathered as bytes.
    is_fp8 = pages.dtype == FP8
    found = (pages.view(torch.uint8) if is_fp8 else pages)[table.long()]
    found = (found.view(FP8) if is_fp8 else found).transpose(1, 2)
    if scale is not None:
        found = found.to(scale.dtype) * scale[:, None, None, None]
    return found.to(q.dtype).reshape(table.shape[0], heads, table.shape[1] * size, dim)


def _refuses(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor, *others: Any
) -> str | None:
    if needs_gradient(q, k, v):
        return "gradients are asked for"
    has_scale = any(isinstance(one, Tensor) for one in others)
    return why_refused(q, k, v, lengths, table, has_scale)


def _work(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor, *others: Any) -> Work:
    """Count all keys of a sequence's pages, as the host does not know the lengths."""
    _, heads, size, dim = k.shape
    *_, window = others
    num_keys = table.shape[1] * size
    num_keys = min(num_keys, window) if window else num_keys
    read = 2 * q.shape[0] * heads * num_keys * dim * k.element_size()
    return Work(4 * q.numel() * num_keys, read + 2 * q.numel() * q.element_size())


def _inputs(shape: tuple[int, ...], draw: Any) -> tuple[Any, ...]:
    """Make a call of (B, query heads, heads, T, N, D, keys of a page, window, whether in FP8).

    Pages are in random order. Where N fills its pages, each sequence has N keys; else lengths
    differ, the last one is 0, and the table has pages that no sequence needs.
    """
    batch, query_heads, heads, tokens, keys, dim, size, window, is_fp8 = shape
    each = -(-keys // size)
    # One page belongs to no sequence.
    num_pages = batch * each + 1
    q = draw(batch, query_heads, tokens, dim)
    caches = [draw(num_pages, heads, size, dim) for _ in range(2)]
    # The reference turns an infinity behind a mask into NaN.
    q, k, v = (one.where(one.isfinite(), 0) for one in (q, *caches))
    table = draw.integers(1 << 30, num_pages).argsort()[: batch * each].view(batch, each)
    lengths = draw.integers(1, batch) + keys
    if keys % size:
        lengths = draw.integers(keys, batch) + 1
        lengths[-1:] = 0
    if not is_fp8:
        return q, k, v, lengths, table, None, None, window
    (k, k_scale), (v, v_scale) = _in_fp8(k), _in_fp8(v)
    return q, k, v, lengths, table, k_scale, v_scale, window


def _in_fp8(pages: Tensor) -> tuple[Tensor, Tensor]:
    """Return pages in e4m3, and the scale of each head."""
    largest = pages.float().abs().amax((0, 2, 3))
    scale = torch.where(largest > 0, largest / LARGEST, 1.0)
    return (pages.float() / scale[:, None, None]).to(FP8), scale


_reference = partial(_gathered, whole.KERNEL.reference)

KERNEL = Kernel(
    name="paged_attention",
    replaces="a gather of a cache's pages, and torch's scaled_dot_product_attention over them",
    reference=_reference,
    truth=partial(_gathered, whole.KERNEL.truth),
    providers=(
        Provider(OURS, lambda: _ours, "kprof", is_varying=True),
        Provider(f"{OURS}-invariant", lambda: partial(_ours, is_invariant=True), "kprof"),
        Provider("eager", lambda: _reference, is_varying=True),
    ),
    refuses=_refuses,
    inputs=_inputs,
    work=_work,
    shapes=(
        (1, 32, 8, 1, 16_384, 128, 64, *PLAIN),
        *((32, 32, 8, 1, 4_096, 128, 64, *kind) for kind in (PLAIN, IN_FP8)),
    ),
    edges=(
        *((3, 8, 2, 1, 300, 64, 16, *PLAIN), (3, 4, 1, 3, 70, 128, 32, 50, 0)),
        *((2, 2, 2, 4, 64, 64, 64, *PLAIN), (3, 8, 2, 1, 100, 64, 16, *IN_FP8)),
        *((2, 4, 2, 2, 96, 128, 32, *IN_FP8), (3, 6, 2, 2, 75, 64, 16, 33, 1)),
    ),
    reach=(2**11,),
    dtypes=("bfloat16", "float16"),
    rows=(0, 3, 4),
    exact=4,
    sources=(
        "Kwon and others, PagedAttention, arXiv 2309.06180: a cache in pages, and their table",
    ),
)
