"""Functions that kernels can replace: how their calls become calls of a kernel."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kprof.kernels import kernel_named
from kprof.kernels._launch import next_power_of_two
from kprof.sites._probe import Setting, are_alike, autocast_of, probing, settings_where
from kprof.sites._ways import key_of

CROSS_ENTROPY, LAYERNORM, RMSNORM, ROPE = "cross_entropy", "layernorm", "rmsnorm", "rope"
DECODE_ATTENTION = "decode_attention"
# With more tokens it is no longer decoding.
MOST_TOKENS = 8
Arguments = tuple[Any, ...]
PLAIN_LOSS = (-100, 0.0, "mean")
# Taken when this was imported: what is there later may be a swap's.
_attention = functional.scaled_dot_product_attention


@dataclass(frozen=True)
class Translation:
    """How a call of a function becomes one of a kernel."""

    kernel: str
    arguments: Callable[..., Arguments | None]
    """Takes the function's arguments; returns the kernel's, None where it has no such call."""
    key: Callable[..., Hashable]
    """Takes the kernel's arguments; returns what the way of the call depends on."""
    probe: Callable[[Callable[..., Tensor], torch.dtype], Arguments]
    """Takes what draws normal values, and a dtype; returns arguments of the function."""
    shape: Callable[..., tuple[int, ...]]
    """Takes the kernel's arguments; returns the shape as its bench counts it."""
    is_default: Callable[[Arguments], bool] = lambda arguments: True
    """Whether these options are those that every provider knows."""


def translation_of(function: object) -> Translation | None:
    """Return how calls of this function become calls of a kernel; None: nobody knows."""
    if is_interface(function):
        return _KNOWN[_attention]
    known = _KNOWN.get(function) if callable(function) else None
    if known is not None or not inspect.isfunction(function):
        return known
    names = list(inspect.signature(function).parameters)
    return _ROTATION if names[:4] == ["q", "k", "cos", "sin"] else None


def is_interface(value: object) -> bool:
    """Tell whether this is where models of Hugging Face look their attention up."""
    return type(value).__name__ == "AttentionInterface" and is_of_hugging_face(type(value))


def is_of_hugging_face(value: Any) -> bool:
    """Tell whether this function or class is one of transformers."""
    return str(getattr(value, "__module__", "")).startswith("transformers.")


def settings_of(function: Callable[..., Any], translation: Translation) -> frozenset[Setting]:
    """Return the settings in which the kernel's reference computes what the function does."""
    reference = kernel_named(translation.kernel).reference
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if is_interface(function):
        function = _attention

    def agrees(setting: Setting) -> bool:
        dtype, cast = setting
        generator = torch.Generator().manual_seed(21)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        given = translation.probe(draw, dtype)
        arguments = translation.arguments(*given)
        if arguments is None:
            return False
        with autocast_of(device, cast):
            original = function(*given)
        return are_alike(reference(*arguments), original)

    with probing(device):
        return settings_where(agrees)


def _rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **named: Any
) -> Arguments | None:
    # Other dimensions than these are what the rest of the arguments is for.
    return None if others or named else (q, k, cos, sin)


def _lose(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Arguments | None:
    if weight is not None or size_average is not None or reduce is not None:
        return None
    return input, target, ignore_index, label_smoothing, reduction


def _norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Arguments | None:
    # Without an epsilon, it depends on torch's version which it is.
    return (input, weight, eps, "torch") if eps is not None and len(normalized_shape) == 1 else None


def _layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Arguments | None:
    return (input, weight, bias, eps) if len(normalized_shape) == 1 else None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Arguments | None:
    if attn_mask is not None or dropout_p or query.dim() != 4 or key.dim() != 4:
        return None
    tokens, keys = query.shape[2], key.shape[2]
    # The first token sees all keys, or one; the kernel's sees all but those of later tokens.
    is_plain = tokens == keys <= MOST_TOKENS if is_causal else tokens == 1
    if not is_plain or not (enable_gqa or query.shape[1] == key.shape[1]):
        return None
    return (query, key, value, None, 0) if is_own_scale(scale, query) else None


def is_own_scale(scale: float | None, q: Tensor) -> bool:
    """Tell whether scores are scaled as usual."""
    return scale is None or math.isclose(scale, q.shape[-1] ** -0.5)


def attention_key(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, window: int) -> Hashable:
    """Return what the way of a call depends on; a cache grows, and the way stays the same."""
    has_gradient = q.requires_grad or k.requires_grad or v.requires_grad
    cache = (*k.shape[:2], next_power_of_two(k.shape[2]), k.shape[3], v.shape == k.shape)
    return key_of(q, k), cache, v.dtype, type(v), lengths is None, window > 0, has_gradient


def attention_shape(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, window: int
) -> tuple[int, ...]:
    """Return the shape as the bench of attention counts it."""
    return q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3]


_ROTATION = Translation(
    ROPE,
    _rotate,
    key=lambda q, k, cos, sin: (key_of(q, k), k.shape, cos.shape, cos.dtype, cos.requires_grad),
    probe=lambda draw, dtype: (
        *(draw(2, 3, 5, 8).to(dtype), draw(2, 1, 5, 8).to(dtype)),
        *(draw(2, 5, 8).to(dtype), draw(2, 5, 8).to(dtype)),
    ),
    shape=lambda q, k, *_: (q.shape[0], q.shape[2], q.shape[1], k.shape[1], q.shape[3]),
)
_KNOWN: dict[object, Translation] = {
    _attention: Translation(
        DECODE_ATTENTION,
        _attend,
        key=attention_key,
        probe=lambda draw, dtype: (
            *(draw(2, 3, 1, 16).to(dtype), draw(2, 3, 7, 16).to(dtype)),
            draw(2, 3, 7, 16).to(dtype),
        ),
        shape=attention_shape,
    ),
    functional.cross_entropy: Translation(
        CROSS_ENTROPY,
        _lose,
        key=lambda x, targets, *options: (key_of(x, targets), targets.shape, options),
        probe=lambda draw, dtype: (
            (3 * draw(6, 50)).to(dtype),
            (100 * draw(6)).long().abs() % 50,
        ),
        shape=lambda x, *_: x.shape,
        is_default=lambda arguments: arguments[2:] == PLAIN_LOSS,
    ),
    functional.rms_norm: Translation(
        RMSNORM,
        _norm,
        key=lambda x, weight, *_: key_of(x, weight),
        probe=lambda draw, dtype: (draw(6, 64).to(dtype), (64,), (draw(64) + 1).to(dtype), 1e-2),
        shape=lambda x, *_: x.shape,
        is_default=lambda arguments: False,
    ),
    functional.layer_norm: Translation(
        LAYERNORM,
        _layer_norm,
        key=lambda x, weight, *_: key_of(x, weight),
        probe=lambda draw, dtype: (
            *(draw(6, 64).to(dtype), (64,)),
            *((draw(64) + 1).to(dtype), draw(64).to(dtype), 1e-2),
        ),
        shape=lambda x, *_: x.shape,
    ),
}
