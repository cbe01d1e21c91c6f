"""Attention as the models of Hugging Face call it: of many tokens, or of a few over a cache.

Those look their attention up by a name, and make a mask for it by the same name. A mask of a plain
causal shape carries what it was made of, so that the kernel need not read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from kprof.sites._attention_calls import (
    ATTENTION_FORWARD,
    ATTENTION_FP8,
    DECODE_ATTENTION,
    FEW_TOKENS,
    MANY_TOKENS,
    MOST_TOKENS,
    Arguments,
    as_autocast,
    is_own_scale,
    many_queries,
)
from kprof.sites._masks import SEEN, Seen
from kprof.sites._translate import Route


class Interface:
    """Hugging Face's attention, by name, with a kernel where it would call torch's."""

    def __init__(self, original: Any, routes: Sequence[Route]) -> None:
        self._original = original
        self._routes = routes
        self._replaced: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._compiled = _attending_compiled(routes)

    def get_interface(self, name: str | None, default: Callable[..., Any]) -> Callable[..., Any]:
        """Return the attention of this name."""
        return self._instead_of(self._original.get_interface(name, default))

    def get(self, name: str, default: Any = None) -> Any:
        """Return the attention of this name, or the default."""
        return self._instead_of(self._original.get(name, default))

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return self._instead_of(self._original[name])

    def __contains__(self, name: str) -> bool:
        return name in self._original

    def _instead_of(self, function: Any) -> Any:
        # By its code: what is wrapped around it has its name.
        code = getattr(function, "__code__", None)
        is_torchs = getattr(code, "co_name", "") == "sdpa_attention_forward"
        if is_compiling():
            return self._compiled(function) if is_torchs else function
        if not is_torchs:
            for one in self._routes:
                one.ways.leave_out("the model does not use torch's attention")
            return function
        if function not in self._replaced:
            self._replaced[function] = _attending(function, self._routes)
        return self._replaced[function]


def _attending(function: Callable[..., Any], routes: Sequence[Route]) -> Callable[..., Any]:
    """Return what is called in the place of Hugging Face's way to torch's attention."""
    original = routes[0].ways.aside(function)

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> Any:
        # The original gets what it was called with: its heads of keys are repeated before a cast.
        q, k, v = as_autocast(query, key, value)
        for translation, ways in routes:
            asked = ARGUMENTS[translation.kernel]
            arguments = asked(module, q, k, v, attention_mask, options)
            if isinstance(arguments, str):
                ways.leave_out(arguments)
                continue
            sort = translation.key(*arguments)
            way = ways.known.get(sort)
            if way is None:
                shape = translation.shape(*arguments)
                way = ways.decide(sort, arguments, shape, is_default=True)
            way.num_calls += 1
            if way.function is not None:
                return way.function(*arguments).transpose(1, 2).contiguous(), None
        return original(module, query, key, value, attention_mask, **options)

    return attend


def _attending_compiled(routes: Sequence[Route]) -> Callable[..., Callable[..., Any]]:
    """Return what makes the same of a function, in a form that a compiler can read."""
    traced = tuple(
        (ARGUMENTS[one.translation.kernel], one.ways.tracing(), one.ways.noting()) for one in routes
    )

    def attending(function: Callable[..., Any]) -> Callable[..., Any]:
        def attend(
            module: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            **options: Any,
        ) -> Any:
            q, k, v = as_autocast(query, key, value)
            for asked, trace, note in traced:
                arguments = asked(module, q, k, v, attention_mask, options)
                if isinstance(arguments, str):
                    note(False)
                    continue
                run = trace(*arguments)
                if run is not None:
                    return run(*arguments).transpose(1, 2).contiguous(), None
            return function(module, query, key, value, attention_mask, **options)

        return attend

    return attending


def _decoding(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> Arguments | str:
    """Return the arguments of a call for `decode_attention`, or why it has none."""
    if q.shape[2] > MOST_TOKENS:
        return MANY_TOKENS
    why = _why_odd(q, k, mask, options)
    if why:
        return why
    if mask is not None:
        seen: Seen = getattr(mask, SEEN)
        return q, k, v, seen.lengths, seen.window
    if q.shape[2] > 1 and not (_is_causal(module, options) and q.shape[2] == k.shape[2]):
        return "several tokens without a mask"
    return q, k, v, None, 0


def _many(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> Arguments | str:
    """Return the arguments of a call for `attention_forward`, or why it has none."""
    if q.shape[2] <= MOST_TOKENS:
        return FEW_TOKENS
    why = _why_odd(q, k, mask, options)
    if why:
        return why
    if mask is None:
        return many_queries(q, k, v, _is_causal(module, options))
    seen: Seen = getattr(mask, SEEN)
    if seen.lengths is not None:
        return "a cache with room for more tokens"
    return q, k, v, True, seen.window


# By kernel: takes what Hugging Face's attention is called with; returns the kernel's arguments, or
# why it has none.
ARGUMENTS: dict[str, Callable[..., Arguments | str]] = {DECODE_ATTENTION: _decoding}
ARGUMENTS |= {ATTENTION_FORWARD: _many, ATTENTION_FP8: _many}


def _why_odd(q: Tensor, k: Tensor, mask: Tensor | None, options: dict[str, Any]) -> str:
    """Return why no kernel takes such a call; empty: one may."""
    if options.get("dropout"):
        return "dropout"
    if options.get("position_bias") is not None or options.get("output_attentions"):
        return "a bias, or weights to return"
    if not is_own_scale(options.get("scaling"), q):
        return "another scale"
    if mask is None:
        return ""
    seen: Seen | None = getattr(mask, SEEN, None)
    fits = mask.shape[2] == q.shape[2] and mask.shape[3] == k.shape[2]
    # A compiler cannot ask whether somebody wrote to it.
    is_known = seen is not None and fits and (is_compiling() or seen.version == mask._version)
    return "" if is_known else "a mask that is not plainly causal"


def _is_causal(module: Any, options: dict[str, Any]) -> bool:
    is_causal = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
