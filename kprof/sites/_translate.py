"""Functions that kernels can replace: how their calls become calls of a kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kprof.kernels import kernel_named
from kprof.sites._probe import Setting, are_alike, autocast_of, probing, settings_where
from kprof.sites._ways import key_of

CROSS_ENTROPY, LAYERNORM, RMSNORM, ROPE = "cross_entropy", "layernorm", "rmsnorm", "rope"
Arguments = tuple[Any, ...]
PLAIN_LOSS = (-100, 0.0, "mean")


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
    known = _KNOWN.get(function) if isinstance(function, Hashable) else None
    if known is not None or not inspect.isfunction(function):
        return known
    names = list(inspect.signature(function).parameters)
    return _ROTATION if names[:4] == ["q", "k", "cos", "sin"] else None


def settings_of(function: Callable[..., Any], translation: Translation) -> frozenset[Setting]:
    """Return the settings in which the kernel's reference computes what the function does."""
    reference = kernel_named(translation.kernel).reference
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

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
