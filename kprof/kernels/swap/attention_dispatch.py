"""Attention as the models of Hugging Face call it: of many tokens, or of a few over a cache.

Those look their attention up by a name, and make a mask for it by the same name. A mask of a plain
causal shape carries its description, so that the kernel need not read it.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kprof.kernels.swap.attention_calls import (
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
from kprof.kernels.swap.patches import Rewired, calls_in, innermost
from kprof.kernels.swap.translate import Route, is_of_hugging_face

SEEN = "kprof_seen"
# What makes masks, and the setting that holds their window.
MASKS = {"create_causal_mask": None, "create_sliding_window_causal_mask": "sliding_window"}
GENERATION = "create_masks_for_generate"


class Seen(NamedTuple):
    """What a causal mask lets tokens see."""

    lengths: Tensor | None
    """Keys of each sequence; None: all."""
    window: int
    version: int
    """Of the mask; who writes to it later makes something else of it."""


def is_mask(value: object) -> TypeGuard[types.FunctionType]:
    """Tell whether this makes a causal mask of Hugging Face's."""
    return inspect.isfunction(value) and value.__name__ in MASKS and is_of_hugging_face(value)


def generation_masks(model: object) -> types.FunctionType | None:
    """Return what makes the masks of a model of Hugging Face's for `generate`.

    With a static cache they are made before the model is called. None where a class makes its own.
    """
    if hasattr(type(model), GENERATION):
        return None
    for one in type(model).__mro__:
        prepare = innermost(one.__dict__.get("prepare_inputs_for_generation"))
        found = prepare.__globals__.get(GENERATION) if prepare is not None else None
        if inspect.isfunction(found) and is_of_hugging_face(found):
            return found
    return None


def remembering_all(function: types.FunctionType) -> Callable[..., Any]:
    """Return what makes the same masks, which carry what `remembering` makes them carry."""
    used = {path: _remembered(value) for path, value in calls_in(function)}
    others = {path: value for path, value in used.items() if value is not None}
    return Rewired(function, others).function


def _remembered(value: object) -> Any:
    """Return what is used in the place of this; None: it makes no masks."""
    if is_mask(value):
        return remembering(value)
    if not isinstance(value, dict):
        return None
    others = {key: _remembered(one) for key, one in value.items()}
    others = {key: one for key, one in others.items() if one is not None}
    return {**value, **others} if others else None


def remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what makes the same mask, which carries what it lets tokens see if that is plain."""
    signature = inspect.signature(function)
    setting = MASKS[function.__name__]

    def make(*args: Any, **kwargs: Any) -> Any:
        mask = function(*args, **kwargs)
        if is_compiling() or not isinstance(mask, Tensor):
            return mask
        if mask.dtype == torch.bool and not mask.is_inference():
            given = signature.bind(*args, **kwargs).arguments
            seen = _seen_by(mask, given, setting)
            if seen is not None:
                setattr(mask, SEEN, seen)
        return mask

    return make


# Those whose tokens follow one another.
CACHES = ("DynamicCache", "StaticCache")
# What may be left out of a plain mask's making, and has to be.
ADDED = ("or_mask_function", "and_mask_function", "block_sequence_ids", "layer_idx")


def _seen_by(mask: Tensor, given: dict[str, Any], setting: str | None) -> Seen | None:
    """Return what a mask lets tokens see; None: nobody knows without reading it."""
    config, cache, padding = (
        given.get(one) for one in ("config", "past_key_values", "attention_mask")
    )
    window = 0 if setting is None else getattr(config, setting, None)
    is_causal = window is not None and getattr(config, "is_causal", True)
    is_plain = is_causal and all(given.get(one) is None for one in ADDED)
    if mask is padding or not (is_plain and type(cache).__name__ in CACHES):
        return None
    is_sliding = list(getattr(cache, "is_sliding", ()))
    layer = is_sliding.index(setting is not None) if (setting is not None) in is_sliding else 0
    num_tokens, cache = mask.shape[2], cast("Any", cache)
    num_keys, first = cache.get_mask_sizes(num_tokens, layer)
    if num_keys != mask.shape[3] or not isinstance(first, int):
        return None
    # Of a window that has moved on, the cache keeps what one new token sees.
    has_moved = first > 0
    if has_moved and not (num_tokens == 1 and num_keys <= cast("int", window)):
        return None
    # Hugging Face asks the same of a mask of one token; who captures a graph cannot ask.
    is_captured = mask.is_cuda and torch.cuda.is_current_stream_capturing()
    if padding is not None and (is_captured or not bool(padding.all())):
        return None
    if has_moved:
        return Seen(None, 0, mask._version)
    end = cache.get_query_offset(layer) + num_tokens
    if isinstance(end, int):
        lengths = None if end == num_keys else torch.full((mask.shape[0],), end, device=mask.device)
    else:
        lengths = end.to(mask.device).reshape(1).expand(mask.shape[0]).contiguous()
    return Seen(lengths, cast("int", window), mask._version)


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
