"""Masks of Hugging Face's models: those of a plain causal shape say what they let tokens see."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kprof.sites._rewire import Rewired, calls_in, innermost
from kprof.sites._translate import is_of_hugging_face

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
