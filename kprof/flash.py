"""Our attention in torch's registry of flash attentions, which swaps it in for a whole process.

torch's dispatcher calls it then, whoever asks for attention: modules of torch, functions under
other names, compiled graphs. What it does not take, or is not the fastest for, goes to the
operators that were there.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kprof.errors import KprofError
from kprof.kernels import OURS
from kprof.kernels._attention_back import run_attention_back
from kprof.kernels._attention_back_ring import run_attention_back_on_hopper
from kprof.kernels.attention_forward import KERNEL, attention_forward, shape_of
from kprof.sites import SiteReport, SwapReport
from kprof.sites._attention_calls import (
    FEW_TOKENS,
    MOST_TOKENS,
    Arguments,
    is_own_scale,
    many_key,
)
from kprof.sites._probe import DTYPES
from kprof.sites._providers import Providers
from kprof.sites._ways import Ways

NAME = "kprof"
SITE = "torch.nn.attention"
# What arrives at an operator, autocast has cast already.
SETTINGS = frozenset((dtype, None) for dtype in DTYPES)
# Our providers, and whether they are the kernel for Hopper.
UNORDERED = f"{OURS}-hopper-unordered"
IS_FOR_HOPPER = {OURS: False, f"{OURS}-hopper": True, UNORDERED: True}


@dataclass(frozen=True)
class Operator:
    """One of torch's operators for attention, and how its calls become calls of a kernel."""

    name: str
    key: str
    """Under which torch's dispatcher finds it."""
    asked: Callable[..., Arguments | str]
    """Takes what it is called with; returns the kernel's arguments, or why it has none."""
    results: Callable[[Arguments, Tensor, Tensor], tuple[Any, ...]] | None
    """Makes its results of arguments, results and log-sum-exps of the kernel; None: gradients."""


class FlashAttention:
    """What torch's registry of flash attentions calls `kprof`: on, off, and what became of calls.

    It runs where it was measured to be the fastest (`kprof kernels bench attention_forward`), or
    where a provider was asked for.
    """

    def __init__(self, provider: str | None, operators: Sequence[Operator]) -> None:
        """Prepare to take calls of these operators."""
        forced = {} if provider is None else {KERNEL.name: provider}
        providers = Providers({KERNEL.name: KERNEL}, forced)
        self._ways = Ways(KERNEL, providers, SETTINGS)
        self._operators = operators
        self._library: torch.library.Library | None = None

    @property
    def report(self) -> SwapReport:
        """What became of all calls so far."""
        site = SiteReport(SITE, KERNEL.name, "flash attention", calls=self._ways.calls())
        return SwapReport((KERNEL.name,), (site,))

    def activate(self) -> FlashAttention:
        """Let torch's operators come here; what torch's registry calls to do so."""
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            # torch says that there was an operator before, which is what this is about.
            warnings.simplefilter("ignore")
            for one in self._operators:
                original = torch.library.get_kernel(f"aten::{one.name}", one.key)
                run = partial(self._run, one, original)
                library.impl(one.name, run, one.key, with_keyset=True)
        self._library = library
        return self

    def remove(self) -> None:
        """Let them be as they were; what torch's registry calls to do so."""
        self._library = None

    def _run(self, operator: Operator, original: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = operator.asked(*args, **kwargs)
        if isinstance(arguments, str):
            self._ways.leave_out(arguments)
            return original.call_boxed(keys, *args, **kwargs)
        # A backward pass is of training, although no gradients of its own are asked for.
        with torch.set_grad_enabled(operator.results is None or torch.is_grad_enabled()):
            sort = many_key(*arguments)
            way = self._ways.known.get(sort)
            if way is None:
                way = self._ways.decide(sort, arguments, shape_of(*arguments))
        if way.provider is not None and way.provider not in IS_FOR_HOPPER:
            self._ways.leave_out(f"{way.provider} was measured to be the fastest")
            return original.call_boxed(keys, *args, **kwargs)
        way.num_calls += 1
        if way.provider is None:
            return original.call_boxed(keys, *args, **kwargs)
        if operator.results is None:
            return _gradients(way.provider, arguments, *args[:6])
        q, k, v, is_causal, window = arguments
        is_for_hopper = IS_FOR_HOPPER[way.provider]
        with torch.no_grad():
            y, lse = attention_forward(
                q, k, v, is_causal=is_causal, window=window, is_for_hopper=is_for_hopper
            )
        return operator.results(arguments, y, lse)


def register_flash_attention(provider: str | None = None) -> FlashAttention:
    """Tell torch's registry of flash attentions of ours, by the name of `kprof`.

    `torch.nn.attention.activate_flash_attention_impl("kprof")` turns it on for the process,
    `restore_flash_attention_impl()` off again.

    Args:
        provider: Of `attention_forward`, `kprof` or `kprof-hopper`; None: where one of the two was
            measured to be the fastest.

    Raises:
        KprofError: this torch has no such registry, or nobody of that name has log-sum-exps.
    """
    register = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register is None:
        raise KprofError(
            f"torch {torch.__version__} has no registry of flash attentions",
            fix="use torch 2.11 or later, or kprof.swapped(model, 'attention_forward')",
        )
    if provider is not None and provider not in IS_FOR_HOPPER:
        raise KprofError(
            f"{provider} cannot be registered as flash attention",
            fix=f"choose among {', '.join(IS_FOR_HOPPER)}",
        )
    attention = FlashAttention(provider, OPERATORS)
    register(NAME, register_fn=attention.activate)
    return attention


def _asked(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> Arguments | str:
    """Return the arguments of a call without a mask, or why there are none."""
    if dropout_p:
        return "dropout"
    if not is_own_scale(scale, q):
        return "another scale"
    if q.shape[2] <= MOST_TOKENS:
        return FEW_TOKENS
    # Results lie in memory as queries do, which compiled graphs rely on; ours lie tokens first.
    if not q.transpose(1, 2).is_contiguous():
        return "queries that do not lie tokens first"
    # The operators do not agree on which keys the first query sees then.
    if is_causal and q.shape[2] != k.shape[2]:
        return "causal, of more keys than queries or fewer"
    return q, k, v, is_causal, 0


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Arguments | str:
    if return_debug_mask:
        return "a mask to return"
    return _asked(query, key, value, dropout_p, is_causal, scale)


def _flash_results(arguments: Arguments, y: Tensor, lse: Tensor) -> tuple[Any, ...]:
    q, k = arguments[:2]
    # Of random numbers, which only dropout takes.
    state, offset = q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)
    return y, lse, None, None, q.shape[2], k.shape[2], state, offset, q.new_empty(0)


def _flash_back(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> Arguments | str:
    if not all(one.transpose(1, 2).is_contiguous() for one in (key, value)):
        return "keys that do not lie tokens first"
    return _asked(query, key, value, dropout_p, is_causal, scale)


def _gradients(
    provider: str,
    arguments: Arguments,
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys and values, whoever made results and log-sum-exps."""
    is_causal, window = arguments[3:]
    options = (1.0 / math.sqrt(q.shape[3]), is_causal, window, q.shape[2], k.shape[2])
    run = run_attention_back_on_hopper if provider == UNORDERED else run_attention_back
    with torch.no_grad():
        gradients: tuple[Tensor, ...] = run(dy, None, q, k, v, y, lse, None, None, *options)
    return gradients


def _cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Arguments | str:
    if attn_bias is not None or return_debug_mask:
        return "a mask"
    if compute_log_sumexp:
        # cuDNN's backward pass wants what cuDNN's forward pass made.
        return "gradients are asked for"
    return _asked(query, key, value, dropout_p, is_causal, scale)


def _cudnn_results(arguments: Arguments, y: Tensor, lse: Tensor) -> tuple[Any, ...]:
    q, k = arguments[:2]
    state, offset = (q.new_empty((), dtype=torch.int64) for _ in range(2))
    return y, lse[..., None], None, None, q.shape[2], k.shape[2], state, offset, None


# cuDNN's is the one that torch prefers on Hopper.
OPERATORS = (
    Operator("_scaled_dot_product_flash_attention", "CUDA", _flash, _flash_results),
    Operator("_scaled_dot_product_flash_attention_backward", "CUDA", _flash_back, None),
    Operator("_scaled_dot_product_cudnn_attention", "CUDA", _cudnn, _cudnn_results),
)
