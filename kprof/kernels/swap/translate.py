"""Functions that kernels can replace: how their calls become calls of a kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kprof.kernels import kernel_named
from kprof.kernels.attention.attention_forward import shape_of as shape_of_many
from kprof.kernels.swap.attention_calls import (
    ATTENTION_FORWARD,
    ATTENTION_FP8,
    DECODE_ATTENTION,
    MANY_TOKENS,
    MOST_TOKENS,
    Arguments,
    attend,
    attend_to_many,
    attention_key,
    attention_shape,
    many_key,
    probe_attention,
)
from kprof.kernels.swap.dispatch import Ways, key_of
from kprof.kernels.swap.probes import (
    ARITHMETIC,
    ARRANGING,
    Operators,
    Setting,
    are_alike,
    autocast_of,
    have_same_gradients,
    probing,
    settings_where,
)
from kprof.kernels.swap.reads import reads_of_function

# The arguments of a rotation, its operators, and how many tokens probes have.
ROTATED = ("q", "k", "cos", "sin")
ROTATING = ARRANGING | ARITHMETIC
LENGTHS = (1, 5, 64, 1_030)
CROSS_ENTROPY, LAYERNORM, RMSNORM, ROPE = "cross_entropy", "layernorm", "rmsnorm", "rope"
PLAIN_LOSS = (-100, 0.0, "mean")
# Taken when this was imported: what is there later may be a swap's.
attention = functional.scaled_dot_product_attention


@dataclass(frozen=True)
class Translation:
    """How a call of a function becomes one of a kernel."""

    kernel: str
    arguments: Callable[..., Arguments | str | None]
    """Takes the function's arguments; returns the kernel's, or why it has no such call, or None."""
    key: Callable[..., Hashable]
    """Takes the kernel's arguments; returns what the way of the call depends on."""
    probe: Callable[[Callable[..., Tensor], torch.dtype], Arguments]
    """Takes what draws normal values, and a dtype; returns arguments of the function."""
    shape: Callable[..., tuple[int, ...]]
    """Takes the kernel's arguments; returns the shape as its bench counts it."""
    is_default: Callable[[Arguments], bool] = lambda arguments: True
    """Whether these options are those that every provider knows."""
    calls: str = ""
    """Which calls of the function these are, where others go to another kernel."""

    def titled(self, name: str) -> str:
        """Return what a report calls these calls of a function."""
        return f"{name}, {self.calls}" if self.calls else name


class Route(NamedTuple):
    """How a function's calls get to a kernel, and the ways that they went."""

    translation: Translation
    ways: Ways


def translations_of(function: object, kernels: Container[str]) -> tuple[Translation, ...]:
    """Return how calls of this function become calls of these kernels."""
    return tuple(one for one in _all_of(function) if one.kernel in kernels)


def _all_of(function: object) -> tuple[Translation, ...]:
    if is_interface(function):
        return _KNOWN[attention]
    known = _KNOWN.get(function, ()) if callable(function) else ()
    if known or not inspect.isfunction(function):
        return known
    names = list(inspect.signature(function).parameters)
    return (_ROTATION,) if names[:4] == [*ROTATED] else ()


def is_interface(value: object) -> bool:
    """Tell whether this is where models of Hugging Face look their attention up."""
    return type(value).__name__ == "AttentionInterface" and is_of_hugging_face(type(value))


def is_of_hugging_face(value: Any) -> bool:
    """Tell whether this function or class is one of transformers."""
    return str(getattr(value, "__module__", "")).startswith("transformers.")


def settings_of(function: Callable[..., Any], translation: Translation) -> frozenset[Setting] | str:
    """Return the settings in which the kernel's reference computes what the function does.

    A sentence says why there are none. Functions of torch's are known by what they are; others
    have their code read before they run.
    """
    why = why_unlike_rotation(function) if translation is _ROTATION else None
    if why is not None:
        return why
    reference = kernel_named(translation.kernel).reference
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    function = attention if is_interface(function) else function

    def agrees(setting: Setting) -> bool:
        dtype, cast = setting
        generator = torch.Generator().manual_seed(21)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        given = translation.probe(draw, dtype)
        arguments = translation.arguments(*given)
        if not isinstance(arguments, tuple):
            return False
        with autocast_of(device, cast):
            original = function(*given)
        return are_alike(reference(*arguments), original)

    with probing(device):
        found = settings_where(agrees)
        if not found:
            return "it computes something else"
        why = _why_not_rotation(function, device) if translation is _ROTATION else None
    return found if why is None else why


def why_unlike_rotation(function: Callable[..., Any]) -> str | None:
    """Return why a function cannot be called with q, k, cos and sin alone; None: it can."""
    parameters = inspect.signature(function).parameters.values()
    names = [one.name for one in parameters]
    if names[:4] != [*ROTATED]:
        return f"it takes {', '.join(names)}, not q, k, cos and sin"
    needed = [one.name for one in list(parameters)[4:] if one.default is one.empty]
    needed = [name for name in needed if name not in ("args", "kwargs")]
    if needed:
        return f"it takes {', '.join(needed)} besides q, k, cos and sin"
    reads = reads_of_function(function)
    return reads if isinstance(reads, str) else None


def _why_not_rotation(function: Callable[..., Any], device: torch.device) -> str | None:
    """Return where a function is no rotation: for other lengths, in its gradients, or besides."""
    generator = torch.Generator().manual_seed(23)
    reference = kernel_named(ROPE).reference
    for length in LENGTHS:
        shapes = ((2, 3, length, 8), (2, 1, length, 8), (2, length, 8), (2, length, 8))
        given = [torch.randn(one, generator=generator).to(device) for one in shapes]
        versions = [one._version for one in given]
        with Operators(*given) as operators:
            original = function(*given)
        why = operators.why_not(ROTATING)
        if why is not None:
            return why
        if [one._version for one in given] != versions:
            return "it writes to its arguments"
        if not are_alike(reference(*given), original):
            return f"it computes something else for {length} tokens"
        for place in (0, 1):
            compute = (_part_of(one, place, given) for one in (reference, function))
            if not have_same_gradients(*compute, given[place]):
                return "its gradients are those of something else"
    return None


def _part_of(
    function: Callable[..., Any], place: int, given: Sequence[Tensor]
) -> Callable[[Tensor], object]:
    """Return what computes one result of a rotation from q, or from k."""

    def compute(one: Tensor) -> object:
        return function(*given[:place], one, *given[place + 1 :])[place]

    return compute


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
_DECODING = Translation(
    DECODE_ATTENTION,
    attend,
    key=attention_key,
    probe=probe_attention(1),
    shape=attention_shape,
)
_MANY = Translation(
    ATTENTION_FORWARD,
    attend_to_many,
    key=many_key,
    probe=probe_attention(MOST_TOKENS + 1),
    shape=shape_of_many,
    calls=MANY_TOKENS,
)
_MANY_NARROW = replace(_MANY, kernel=ATTENTION_FP8, calls=f"{_MANY.calls}, in FP8")
_LOSS = Translation(
    CROSS_ENTROPY,
    _lose,
    key=lambda x, targets, *options: (key_of(x, targets), targets.shape, options),
    probe=lambda draw, dtype: (
        (3 * draw(6, 50)).to(dtype),
        (100 * draw(6)).long().abs() % 50,
    ),
    shape=lambda x, *_: x.shape,
    is_default=lambda arguments: arguments[2:] == PLAIN_LOSS,
)
_RMS_NORM = Translation(
    RMSNORM,
    _norm,
    key=lambda x, weight, *_: key_of(x, weight),
    probe=lambda draw, dtype: (draw(6, 64).to(dtype), (64,), (draw(64) + 1).to(dtype), 1e-2),
    shape=lambda x, *_: x.shape,
    is_default=lambda arguments: False,
)
_LAYER_NORM = Translation(
    LAYERNORM,
    _layer_norm,
    key=lambda x, weight, *_: key_of(x, weight),
    probe=lambda draw, dtype: (
        *(draw(6, 64).to(dtype), (64,)),
        *((draw(64) + 1).to(dtype), draw(64).to(dtype), 1e-2),
    ),
    shape=lambda x, *_: x.shape,
)
_KNOWN: dict[object, tuple[Translation, ...]] = {
    attention: (_DECODING, _MANY_NARROW, _MANY),
    functional.cross_entropy: (_LOSS,),
    functional.rms_norm: (_RMS_NORM,),
    functional.layer_norm: (_LAYER_NORM,),
}
