"""Attention of a few tokens over a cache: as torch calls it, and as the models of Hugging Face do.

Those look their attention up by a name, and make a mask for it by the same name. A mask of a plain
causal shape carries what it was made of, so that the kernel need not read it.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kprof.sites._translate import (
    MOST_TOKENS,
    Arguments,
    attention_key,
    attention_shape,
    is_of_hugging_face,
    is_own_scale,
)
from kprof.sites._ways import Ways

SEEN = "kprof_seen"
MASKS = {"create_causal_mask": None, "create_sliding_window_causal_mask": "sliding_window"}


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


class Interface:
    """Hugging Face's attention, by name, with a kernel where it would call torch's."""

    def __init__(self, original: Any, ways: Ways) -> None:
        self._original = original
        self._ways = ways
        self._replaced: dict[Callable[..., Any], Callable[..., Any]] = {}

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
        # A compiler makes something else of the original.
        if is_compiling():
            return function
        if getattr(function, "__name__", "") != "sdpa_attention_forward":
            self._ways.leave_out("the model does not use torch's attention")
            return function
        if function not in self._replaced:
            self._replaced[function] = _attending(function, self._ways)
        return self._replaced[function]


def _attending(function: Callable[..., Any], ways: Ways) -> Callable[..., Any]:
    """Return what is called in the place of Hugging Face's way to torch's attention."""

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> Any:
        arguments = _arguments(module, query, key, value, attention_mask, options)
        if isinstance(arguments, str):
            ways.leave_out(arguments)
            run = None
        else:
            sort = attention_key(*arguments)
            way = ways.known.get(sort)
            if way is None:
                way = ways.decide(sort, arguments, attention_shape(*arguments), is_default=True)
            way.num_calls += 1
            run = way.function
        if run is None or isinstance(arguments, str):
            return function(module, query, key, value, attention_mask, **options)
        return run(*arguments).transpose(1, 2).contiguous(), None

    return attend


def _arguments(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> Arguments | str:
    """Return the kernel's arguments of a call, or why it has none."""
    if q.shape[2] > MOST_TOKENS:
        return f"more than {MOST_TOKENS} tokens"
    if options.get("dropout"):
        return "dropout"
    if options.get("position_bias") is not None or options.get("output_attentions"):
        return "a bias, or weights to return"
    if not is_own_scale(options.get("scaling"), q):
        return "another scale"
    if mask is not None:
        seen: Seen | None = getattr(mask, SEEN, None)
        fits = mask.shape[2:] == (q.shape[2], k.shape[2])
        if seen is None or seen.version != mask._version or not fits:
            return "a mask that is not plainly causal"
        return q, k, v, seen.lengths, seen.window
    is_causal = options.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if q.shape[2] > 1 and not (is_causal and q.shape[2] == k.shape[2]):
        return "several tokens without a mask"
    return q, k, v, None, 0


def remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what makes the same mask, which carries what it lets tokens see if that is plain."""
    signature = inspect.signature(function)
    setting = MASKS[function.__name__]

    def make(*args: Any, **kwargs: Any) -> Any:
        mask = function(*args, **kwargs)
        is_known = isinstance(mask, Tensor) and mask.dtype == torch.bool and not mask.is_inference()
        if is_known and not is_compiling():
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
    is_decoding = type(cache).__name__ in CACHES and mask.shape[2] <= MOST_TOKENS
    if mask is padding or not (is_plain and is_decoding):
        return None
    is_sliding = list(getattr(cache, "is_sliding", ()))
    layer = is_sliding.index(setting is not None) if (setting is not None) in is_sliding else 0
    num_tokens, cache = mask.shape[2], cast("Any", cache)
    num_keys, first = cache.get_mask_sizes(num_tokens, layer)
    if num_keys != mask.shape[3] or not isinstance(first, int) or first:
        return None
    # Hugging Face asks the same of a mask of one token; who captures a graph cannot ask.
    is_captured = mask.is_cuda and torch.cuda.is_current_stream_capturing()
    if padding is not None and (is_captured or not bool(padding.all())):
        return None
    end = cache.get_query_offset(layer) + num_tokens
    if isinstance(end, int):
        lengths = None if end == num_keys else torch.full((mask.shape[0],), end, device=mask.device)
    else:
        lengths = end.to(mask.device).reshape(1).expand(mask.shape[0]).contiguous()
    return Seen(lengths, cast("int", window), mask._version)
