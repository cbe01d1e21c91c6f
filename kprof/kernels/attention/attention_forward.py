"""Attention of many queries, as in training: y = softmax(scale * q k') v, with gradients.

q is (B, query heads, T, D), k and v are (B, heads, N, D); the log-sum-exp of each row's scores is
returned, too. `attention_forward` is the public function. Two implementations have the same
arguments: `_triton` for every GPU, and `_hopper`, warp-specialised, for Hopper. A CTA keeps a tile
of queries while keys and values pass by, so scores never reach memory; the backward pass recomputes
them.
"""

from __future__ import annotations

import importlib
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kprof.kernels import OURS, Kernel, Provider, Work
from kprof.kernels.attention._hopper import forward_hopper, why_unavailable
from kprof.kernels.attention._hopper_backward import backward_hopper, backward_hopper_ordered
from kprof.kernels.attention._reference import reference, truth
from kprof.kernels.attention._triton import backward_triton, forward_triton
from kprof.kernels.runtime import applied


class _WithGradient(torch.autograd.Function):
    """The operators with gradients, outside the dispatcher, which is faster."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        options: tuple[Any, ...],
        max_seqlen_k: int,
        is_for_hopper: bool,
        is_ordered: bool,
    ) -> tuple[Tensor, Tensor]:
        run = forward_hopper if is_for_hopper else forward_triton
        y, lse = run(q, k, v, cu_seqlens_q, cu_seqlens_k, *options)
        ctx.save_for_backward(q, k, v, y, lse, cu_seqlens_q, cu_seqlens_k)
        ctx.set_materialize_grads(False)
        ctx.options = (*options, max_seqlen_k)
        on_hopper = backward_hopper_ordered if is_ordered else backward_hopper
        ctx.run_back = on_hopper if is_for_hopper else backward_triton
        return y, lse

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        y = ctx.saved_tensors[3]
        dy = torch.zeros_like(y) if dy is None else dy
        gradients = ctx.run_back(dy, dlse, *ctx.saved_tensors, *ctx.options)
        return *gradients, None, None, None, None, None, None


attend_with_gradient = applied(_WithGradient)

DTYPES = (torch.float16, torch.bfloat16)
DIMS = (64, 128, 256)
# Largest second or third dimension of a grid.
MOST_PLACES = 65_535
MOST_KEYS = 1 << 30
# Backends of torch; their gradients may differ in their last bits from run to run.
BACKENDS = (("sdpa-flash", "FLASH_ATTENTION"), ("sdpa-cudnn", "CUDNN_ATTENTION"))
# Peers: name, module and package. FlashAttention-3 as it is published has no backward pass.
PEERS = (
    ("flash-attn-3", "fa3_fwd_interface", "fa3-fwd"),
    ("flash-attn-3-built", "flash_attn_interface", "flash_attn_3"),
    ("flash-attn-4", "flash_attn.cute", "flash-attn-4"),
)
# The window of a shape where queries see all keys up to their own.
ALL_EARLIER = 1


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = True,
    window: int = 0,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    is_for_hopper: bool = False,
    is_ordered: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return y, the weighted mean of the values for each query, and the log-sum-exp of its scores.

    With fewer queries than keys, the queries are the last ones. A query that sees no key gets 0 and
    -inf. A masked value has the weight 0, as in torch, so a NaN in it may reach the result.

    Args:
        q: (B, query heads, T, D) in float16 or bfloat16, D 64, 128 or 256.
        k: (B, heads, N, D), as q.
        v: As k.
        cu_seqlens_q: (sequences + 1,) of integers: where each sequence begins in T, of a batch of
            one, and where the last one ends.
        cu_seqlens_k: The same of keys, in N; both or none.
        scale: Of the scores, above 0; None: 1 / sqrt(D).
        is_causal: Whether a query sees no later key.
        window: Keys that a query sees before its own, and after it unless causal, its own counted;
            0: no bound.
        max_seqlen_q: Most queries of a sequence, with `cu_seqlens_q`; 0: T.
        max_seqlen_k: Most keys of a sequence, likewise; 0: N. Only gradients need it.
        is_for_hopper: Whether the kernels of `_hopper` run.
        is_ordered: Whether these sum dq in one order, to the same bits in every run.
    """
    # Triton specialises an integer of 1, but no float.
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    options = (scale, is_causal, window, max_seqlen_q or q.shape[2])
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        max_seqlen_k = max_seqlen_k or k.shape[2]
        with_gradient: tuple[Tensor, Tensor] = attend_with_gradient(
            *(q, k, v, cu_seqlens_q, cu_seqlens_k, options, max_seqlen_k, is_for_hopper, is_ordered)
        )
        return with_gradient
    run = forward_hopper if is_for_hopper else forward_triton
    results: tuple[Tensor, Tensor] = run(q, k, v, cu_seqlens_q, cu_seqlens_k, *options)
    return results


def _ours(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = True,
    window: int = 0,
    scale: float | None = None,
) -> Tensor:
    return attention_forward(q, k, v, scale=scale, is_causal=is_causal, window=window)[0]


def _for_hopper(*, is_ordered: bool) -> Any:
    why = why_unavailable()
    if why:
        raise ImportError(why)

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = True,
        window: int = 0,
        scale: float | None = None,
    ) -> Tensor:
        how = {"is_causal": is_causal, "is_for_hopper": True, "is_ordered": is_ordered}
        return attention_forward(q, k, v, scale=scale, window=window, **how)[0]

    return call


def _refuses(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = True,
    window: int = 0,
    scale: float | None = None,
) -> str | None:
    if q.dim() != 4 or k.dim() != 4 or v.shape != k.shape or q.shape[0] != k.shape[0]:
        return f"queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)}"
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"queries in {q.dtype}, keys in {k.dtype}: not all float16 or all bfloat16"
    if q.shape[-1] not in DIMS or k.shape[-1] != q.shape[-1]:
        return f"heads of {q.shape[-1]}, not of {', '.join(map(str, DIMS))}"
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        return f"{q.shape[1]} query heads do not share {k.shape[1]} heads of keys"
    if max(q.shape[:2]) > MOST_PLACES or max(q.shape[2], k.shape[2]) > MOST_KEYS:
        return f"{tuple(q.shape)}: more than a grid has room for"
    if scale is not None and not 0 < scale < math.inf:
        return f"a scale of {scale}"
    return None


def _work(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = True,
    window: int = 0,
    scale: float | None = None,
) -> Work:
    batch, heads, num_queries, dim = q.shape
    pairs = _count_pairs(num_queries, k.shape[2], is_causal, window)
    moved = 2 * q.numel() + 2 * k.numel()
    return Work(4 * batch * heads * dim * pairs, moved * q.element_size())


def _backward_work(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = True,
    window: int = 0,
    scale: float | None = None,
) -> Work:
    """Count five GEMMs for the two of the forward pass; y and dy are read."""
    moved = 4 * q.numel() + 4 * k.numel()
    return Work(_work(q, k, v, is_causal, window).flops * 5 // 2, moved * q.element_size())


def _count_pairs(num_queries: int, num_keys: int, is_causal: bool, window: int) -> int:
    """Return the number of query-key pairs of a head that are not masked."""
    own = torch.arange(num_queries) + num_keys - num_queries
    reach = window or num_queries + num_keys
    first = (own - reach + 1).clamp(0, num_keys)
    end = (own + (1 if is_causal else reach)).clamp(0, num_keys)
    return int((end - first).clamp(min=0).sum())


def _of_torch(backend: str) -> Any:
    """Return torch's attention by one of its backends."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def call(*arguments: Any) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return reference(*arguments)

    return call


def _bounds(q: Tensor, k: Tensor, is_causal: bool, window: int) -> tuple[int, int]:
    """Return FlashAttention's window_size; -1: no bound."""
    side = window - 1 if 0 < window < max(q.shape[2], k.shape[2]) else -1
    return side, 0 if is_causal else side


def _flash(module: str) -> Any:
    """Return FlashAttention of a module."""
    attend = importlib.import_module(module).flash_attn_func

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = True,
        window: int = 0,
        scale: float | None = None,
    ) -> Any:
        left, right = _bounds(q, k, is_causal, window)
        given = (one.transpose(1, 2) for one in (q, k, v))
        options: dict[str, Any] = {"window_size": (left, right)} if left >= 0 else {}
        options |= {} if scale is None else {"softmax_scale": scale}
        y = attend(*given, causal=is_causal, **options)
        y = y[0] if isinstance(y, tuple) else y
        if torch.is_grad_enabled() and q.requires_grad and not y.requires_grad:
            raise NotImplementedError(f"{module} has no gradients")
        return y.transpose(1, 2)

    return call


def _inputs(shape: tuple[int, ...], draw: Any) -> tuple[Any, ...]:
    """Make a call of (B, query heads, heads, T, N, window, D), as `shape_of` counts it."""
    batch, query_heads, heads, queries, keys, window, dim = shape
    q = draw(batch, query_heads, queries, dim)
    k, v = (draw(batch, heads, keys, dim) for _ in range(2))
    if window:
        # The reference turns an infinity behind a mask into NaN.
        q, k, v = (one.where(one.isfinite(), 0) for one in (q, k, v))
    return q, k, v, window > 0, 0 if window == ALL_EARLIER else window


def shape_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = True,
    window: int = 0,
    scale: float | None = None,
) -> tuple[int, ...]:
    """Return (B, query heads, heads, T, N, window, D) of a call without a window, or causal.

    The window is 0 where every key is seen, 1 where every earlier one is.
    """
    if is_causal and not 0 < window < max(q.shape[2], k.shape[2]):
        window = ALL_EARLIER
    return q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], window, q.shape[3]


KERNEL = Kernel(
    name="attention_forward",
    replaces="torch's scaled_dot_product_attention, of many queries",
    reference=reference,
    truth=truth,
    providers=(
        Provider(OURS, lambda: _ours, "kprof"),
        Provider(f"{OURS}-hopper", partial(_for_hopper, is_ordered=True), "kprof"),
        Provider(
            *(f"{OURS}-hopper-unordered", partial(_for_hopper, is_ordered=False), "kprof"),
            repeats=False,
        ),
        Provider("eager", lambda: reference, is_varying=True, repeats=False),
        *(
            Provider(name, partial(_of_torch, backend), is_varying=True, repeats=False)
            for name, backend in BACKENDS
        ),
        Provider("sdpa-math", partial(_of_torch, "MATH"), is_varying=True),
        *(
            Provider(name, partial(_flash, module), package, is_varying=True, repeats=False)
            for name, module, package in PEERS
        ),
    ),
    refuses=_refuses,
    inputs=_inputs,
    work=_work,
    shapes=(
        *((16_384 // n, 16, 16, n, n, 1, 128) for n in (512, 2_048, 8_192, 16_384)),
        *((16_384 // n, 16, 16, n, n, 0, 128) for n in (2_048, 8_192)),
        *((2, 32, 32, 8_192, 8_192, 1, 64), (2, 8, 8, 8_192, 8_192, 1, 256)),
        (1, 32, 8, 8_192, 8_192, 1, 128),
    ),
    edges=(
        *((3, 4, 2, 70, 70, 1, 64), (2, 2, 1, 40, 150, 1, 64), (2, 2, 2, 140, 30, 1, 64)),
        *((2, 2, 1, 1, 70, 0, 128), (2, 2, 1, 90, 90, 17, 64), (1, 2, 1, 20, 40, 0, 256)),
    ),
    reach=(2**13,),
    dtypes=("bfloat16", "float16"),
    differentiable=(0, 1, 2),
    backward_work=_backward_work,
    rows=(0, 1, 2),
    # Hugging Face's function puts the tokens before the heads, contiguous, and so does the swap.
    has_free_strides=True,
    exact=2,
    unmeasured="eager",
    sources=(
        "Milakov and Gimelshein, Online normalizer calculation, arXiv 1805.02867",
        "Dao, FlashAttention-2, arXiv 2307.08691: tiles of queries, keys pass by; and backward",
        "Shah and others, FlashAttention-3, arXiv 2407.08608: two warpgroups take turns",
    ),
)
