"""What decode attention takes: beyond it, results would be wrong, or read from elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from kprof.errors import KprofError

FP8 = torch.float8_e4m3fn
DTYPES = (torch.float16, torch.bfloat16)
DIMS = (64, 128, 256)
# Query heads of a head of keys times query tokens: the rows of a tile.
MOST_ROWS = 64
# Of a grid's second and third dimension.
MOST_PLACES = 65_535


def refusal(why: str | None) -> KprofError:
    """Return what is raised for that reason."""
    return KprofError(
        f"decode_attention cannot take this call: {why}",
        fix="give it what its documentation names, or call torch's scaled_dot_product_attention",
    )


def why_refused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None = None,
    table: Tensor | None = None,
    has_scale: bool = False,
) -> str | None:
    """Return why these tensors cannot be attended with and to; None: they can."""
    if q.dim() != 4 or k.dim() != 4 or v.shape != k.shape:
        return f"queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)}"
    if table is None and q.shape[0] != k.shape[0]:
        return f"{q.shape[0]} sequences of queries, {k.shape[0]} of keys"
    if q.dtype not in DTYPES or k.dtype not in (q.dtype, FP8) or v.dtype != k.dtype:
        return f"queries in {q.dtype}, keys in {k.dtype}: not float16 or bfloat16, and keys as they"
    if q.shape[-1] not in DIMS or k.shape[-1] != q.shape[-1]:
        return f"heads of {q.shape[-1]} and {k.shape[-1]}, not both of {', '.join(map(str, DIMS))}"
    if has_scale and k.dtype != FP8:
        return f"scales of keys and values in {k.dtype}"
    return _why_too_many(q, k) or _why_not_placed(q, lengths, table)


def _why_too_many(q: Tensor, k: Tensor) -> str | None:
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        return f"{q.shape[1]} query heads do not share {k.shape[1]} heads of keys"
    if max(q.shape[0], k.shape[1]) > MOST_PLACES:
        return f"{q.shape[0]} sequences of {k.shape[1]} heads: more than a grid has room for"
    if q.shape[1] // k.shape[1] * q.shape[2] > MOST_ROWS:
        return f"{q.shape[2]} tokens: too many to decode"
    return None


def _why_not_placed(q: Tensor, lengths: Tensor | None, table: Tensor | None) -> str | None:
    for name, one, num_dimensions in (("lengths", lengths, 1), ("a table", table, 2)):
        if one is None:
            continue
        if one.dim() != num_dimensions or one.shape[0] != q.shape[0]:
            return f"{name} of shape {tuple(one.shape)} for {q.shape[0]} sequences"
        if one.is_floating_point() or one.dtype == torch.bool:
            return f"{name} in {one.dtype}, not in integers"
        if one.device != q.device:
            return f"{name} on {one.device}, queries on {q.device}"
    return None
