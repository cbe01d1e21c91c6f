"""Translation of calls: how a call of a function becomes one of a kernel, for torch's functions.

Attention of a few tokens over a cache goes to `decode_attention`, of more tokens to
`attention_forward`; rotations, norms and the cross-entropy have one kernel each.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kprof.kernels import kernel_named
from kprof.kernels.runtime import next_power_of_two
from kprof.kernels.swap.dispatch import Dispatcher, key_of
from kprof.kernels.swap.patches import TORCHS
from kprof.kernels.swap.probes import (
    ARITHMETIC,
    ARRANGING,
    CANNOT,
    Operators,
    Setting,
    are_alike,
    autocast_of,
    have_same_gradients,
    is_more_exact,
    probing,
    settings_where,
)
from kprof.kernels.swap.reads import reads_of_function

DECODE_ATTENTION, ATTENTION_FORWARD = "decode_attention", "attention_forward"
ATTENTION_FP8 = "attention_fp8"
# Tokens per call of decoding; with more, it is prefill.
MOST_TOKENS = 8
FEW_TOKENS, MANY_TOKENS = f"{MOST_TOKENS} tokens or fewer", f"more than {MOST_TOKENS} tokens"
OTHER_SCALE = "another scale"
OTHER_KERNEL = "another kernel takes its logits"
Arguments = tuple[Any, ...]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Arguments | str | None:
    """Return the arguments of `decode_attention` for a call of torch's attention."""
    if attn_mask is not None or dropout_p or query.dim() != 4 or key.dim() != 4:
        return None
    tokens, keys = query.shape[2], key.shape[2]
    # With is_causal torch aligns the mask at the first key, the kernel at the last one.
    is_plain = tokens == keys <= MOST_TOKENS if is_causal else tokens == 1
    if not is_plain or not (enable_gqa or query.shape[1] == key.shape[1]):
        return MANY_TOKENS if tokens > MOST_TOKENS else None
    return (query, key, value, None, 0) if is_own_scale(scale, query) else None


def attend_to_many(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Arguments | str | None:
    """Return the arguments of `attention_forward` for a call of torch's attention."""
    if attn_mask is not None or dropout_p or query.dim() != 4 or key.dim() != 4:
        return None
    if query.shape[2] <= MOST_TOKENS:
        return FEW_TOKENS
    if not (enable_gqa or query.shape[1] == key.shape[1]):
        return None
    return many_queries(query, key, value, is_causal, scale)


def attend_to_many_in_fp8(*args: Any, **kwargs: Any) -> Arguments | str | None:
    """Return the arguments of `attention_fp8` for a call of torch's attention."""
    return with_own_scale(attend_to_many(*args, **kwargs))


def many_queries(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None = None
) -> Arguments | str:
    """Return the arguments of `attention_forward` for torch's attention without a mask.

    Torch aligns a causal mask at the first query and key, the kernel at the last ones. Keys that no
    query sees are cut off.
    """
    tokens, keys = q.shape[2], k.shape[2]
    if is_causal and tokens > keys:
        return "more tokens than keys"
    if is_causal:
        k, v = k[:, :, :tokens], v[:, :, :tokens]
    return scaled((q, k, v, is_causal, 0), scale)


def scaled(arguments: Arguments, scale: float | None) -> Arguments:
    """Return arguments of `attention_forward` with a scale, which stands last if it is another."""
    return arguments if is_own_scale(scale, arguments[0]) else (*arguments, scale)


def with_own_scale(arguments: Arguments | str | None) -> Arguments | str | None:
    """Return the arguments of `attention_forward` for a kernel that has the usual scale alone."""
    is_other = isinstance(arguments, tuple) and len(arguments) > len(("q", "k", "v", "", ""))
    return OTHER_SCALE if is_other else arguments


def as_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs cast as torch's attention casts them under autocast.

    Under autocast, rotary embeddings return float32 queries and keys; values are not float32.
    """
    kind = q.device.type
    # Torch raises on devices without autocast, such as meta.
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    q, k, v = (one if one.dtype == torch.float64 else one.to(dtype) for one in (q, k, v))
    return q, k, v


def casting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's attention with inputs cast as under autocast."""

    def attend_to_cast(query: Tensor, key: Tensor, value: Tensor, *args: Any, **named: Any) -> Any:
        return function(*as_autocast(query, key, value), *args, **named)

    return attend_to_cast


def is_own_scale(scale: float | None, q: Tensor) -> bool:
    """Return whether the scale is the default."""
    return scale is None or math.isclose(scale, q.shape[-1] ** -0.5)


def attention_key(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, window: int) -> Hashable:
    """Return the key of a call's decision; it does not change for each token of a growing cache."""
    has_gradient = q.requires_grad or k.requires_grad or v.requires_grad
    cache = (*k.shape[:2], next_power_of_two(k.shape[2]), k.shape[3], v.shape == k.shape)
    return key_of(q, k), cache, v.dtype, type(v), lengths is None, window > 0, has_gradient


def attention_shape(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, window: int
) -> tuple[int, ...]:
    """Return the shape as the bench of attention counts it."""
    return q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3]


def many_key(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, window: int, scale: float | None = None
) -> Hashable:
    """Return the key of the decision about a call of `attention_forward`."""
    has_gradient = q.requires_grad or k.requires_grad or v.requires_grad
    options = is_causal, window, scale
    return key_of(q, k), k.shape, v.shape, v.dtype, type(v), options, has_gradient


def probe_attention(tokens: int) -> Callable[..., Arguments]:
    """Return a function that draws arguments of torch's attention for so many queries."""
    return lambda draw, dtype: (
        *(draw(2, 3, tokens, 16).to(dtype), draw(2, 3, tokens + 6, 16).to(dtype)),
        draw(2, 3, tokens + 6, 16).to(dtype),
    )


# Arguments of a rotation, its operators, and the lengths of probes in tokens.
ROTATED = ("q", "k", "cos", "sin")
ROTATING = ARRANGING | ARITHMETIC
LENGTHS = (1, 5, 64, 1_030)
CROSS_ENTROPY, LAYERNORM, RMSNORM, ROPE = "cross_entropy", "layernorm", "rmsnorm", "rope"
PLAIN_LOSS = (-100, 0.0, "mean")
attention = TORCHS.attention


@dataclass(frozen=True)
class Translation:
    """The translation of a function's calls into calls of a kernel."""

    kernel: str
    arguments: Callable[..., Arguments | str | None]
    """Takes the function's arguments; returns the kernel's, or why it has no such call, or None."""
    key: Callable[..., Hashable]
    """Takes the kernel's arguments; returns the key of the decision."""
    probe: Callable[[Callable[..., Tensor], torch.dtype], Arguments]
    """Takes a function that draws normal values, and a dtype; returns arguments."""
    shape: Callable[..., tuple[int, ...]]
    """Takes the kernel's arguments; returns the shape as its bench counts it."""
    is_default: Callable[[Arguments], bool] = lambda arguments: True
    """Whether every provider supports these options."""
    calls: str = ""
    """Which calls of the function these are, if others go to another kernel."""
    is_more_exact: bool = False
    """Whether the kernel keeps in float32 what the function rounds to its input's dtype."""
    returned: Callable[[Any], Any] = lambda result: result
    """Takes the kernel's result; returns it as the function does."""
    why_not: Callable[[Callable[..., Any]], str | None] | None = None
    """Takes a function that is not torch's; returns what else stands against it."""

    def titled(self, name: str) -> str:
        """Return the title of these calls in a report."""
        return f"{name}, {self.calls}" if self.calls else name


class Route(NamedTuple):
    """The translation of a function's calls, and their dispatcher."""

    translation: Translation
    dispatcher: Dispatcher


def translations_of(function: object, kernels: Container[str]) -> tuple[Translation, ...]:
    """Return the translations of this function's calls for these kernels."""
    return tuple(one for one in _all_of(function) if one.kernel in kernels)


def _all_of(function: object) -> tuple[Translation, ...]:
    if is_interface(function):
        return _KNOWN[attention]
    known = _KNOWN.get(function, ()) if callable(function) else ()
    if known or not inspect.isfunction(function):
        return known
    names = list(inspect.signature(function).parameters)
    if names[:4] != [*ROTATED]:
        return ()
    return (_ROTATION_OF_PARTS,) if _rotates_parts(function) else (_ROTATION,)


@functools.cache
def _rotates_parts(function: Callable[..., Any]) -> bool:
    """Return whether a rotation takes angles of fewer columns than heads have, for the first."""
    if why_unlike_rotation(function) is not None:
        return False
    with probing(torch.device("cpu")) as generator:
        shapes = ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 4), (2, 5, 4))
        given = [torch.randn(one, generator=generator) for one in shapes]
        try:
            return are_alike(function(*given), kernel_named(ROPE).reference(*given))
        except CANNOT:
            return False


def is_interface(value: object) -> bool:
    """Return whether this is the registry of attention functions of Hugging Face."""
    return type(value).__name__ == "AttentionInterface" and is_of_hugging_face(type(value))


def is_of_hugging_face(value: Any) -> bool:
    """Return whether this function or class is from transformers."""
    return str(getattr(value, "__module__", "")).startswith("transformers.")


def settings_of(function: Callable[..., Any], translation: Translation) -> frozenset[Setting] | str:
    """Return the settings in which the kernel's reference computes what the function does.

    A sentence says why there are none. Functions of torch are known by identity; the code of others
    is analysed before it runs.
    """
    why = why_unlike_rotation(function) if translation.why_not is _why_not_rotation else None
    if why is not None:
        return why
    kernel = kernel_named(translation.kernel)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    function = attention if is_interface(function) else function
    # A module of torch that a forward makes calls torch's function.
    function = TORCHS.cross_entropy if function is TORCHS.cross_entropy_module else function

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
        new = translation.returned(kernel.reference(*arguments))
        if are_alike(new, original) or not translation.is_more_exact:
            return are_alike(new, original)
        truth = kernel.truth(arguments[0].double(), *arguments[1:])
        return is_more_exact(new, original, truth, dtype)

    with probing(device):
        found = settings_where(agrees)
        if not found:
            return "it computes something else"
        why = translation.why_not and translation.why_not(function)
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


def _why_not_rotation(function: Callable[..., Any]) -> str | None:
    """Return why a function is no rotation: results, gradients, operators or side effects."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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
    """Return a function that computes one result of a rotation from q or k."""

    def compute(one: Tensor) -> object:
        return function(*given[:place], one, *given[place + 1 :])[place]

    return compute


def _rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **named: Any
) -> Arguments | str | None:
    # Other arguments select other dimensions.
    is_whole = not isinstance(cos, Tensor) or cos.shape[-1:] == q.shape[-1:]
    return _rotate_part(q, k, cos, sin, *others, **named) if is_whole else None


def _rotate_part(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **named: Any
) -> Arguments | str | None:
    if others or named:
        return None
    # The function may return the wider dtype; the kernel does not.
    is_mixed = isinstance(cos, Tensor) and cos.dtype != q.dtype
    return f"heads in {q.dtype}, angles in {cos.dtype}" if is_mixed else (q, k, cos, sin)


def loss_arguments(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Arguments | str | None:
    """Return the arguments of `cross_entropy` for a call of torch's."""
    if not isinstance(input, Tensor):
        return OTHER_KERNEL
    if weight is not None or size_average is not None or reduce is not None:
        return None
    return input, target, ignore_index, label_smoothing, reduction


def _norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Arguments | None:
    # The default epsilon depends on torch's version.
    return (input, weight, eps, "torch") if eps is not None and len(normalized_shape) == 1 else None


def _layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Arguments | None:
    return (input, weight, bias, eps) if len(normalized_shape) == 1 else None


def _shape_of_many(*arguments: Any) -> tuple[int, ...]:
    # Imports the attention kernels, which swaps of other functions do without.
    from kprof.kernels.attention.attention_forward import shape_of

    return shape_of(*arguments)


_ROTATION = Translation(
    ROPE,
    _rotate,
    key=lambda q, k, cos, sin: (key_of(q, k), k.shape, cos.shape, cos.dtype, cos.requires_grad),
    probe=lambda draw, dtype: (
        *(draw(2, 3, 5, 8).to(dtype), draw(2, 1, 5, 8).to(dtype)),
        *(draw(2, 5, 8).to(dtype), draw(2, 5, 8).to(dtype)),
    ),
    shape=lambda q, k, *_: (q.shape[0], q.shape[2], q.shape[1], k.shape[1], q.shape[3]),
    why_not=_why_not_rotation,
)
_ROTATION_OF_PARTS = replace(
    _ROTATION,
    arguments=_rotate_part,
    is_default=lambda arguments: bool(arguments[2].shape[-1] == arguments[0].shape[-1]),
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
    shape=_shape_of_many,
    calls=MANY_TOKENS,
)
_MANY_NARROW = replace(
    _MANY,
    kernel=ATTENTION_FP8,
    arguments=attend_to_many_in_fp8,
    calls=f"{_MANY.calls}, in FP8",
)
_LOSS = Translation(
    CROSS_ENTROPY,
    loss_arguments,
    key=lambda x, targets, *options: (key_of(x, targets), targets.shape, options),
    probe=lambda draw, dtype: (
        (3 * draw(6, 50)).to(dtype),
        (100 * draw(6)).long().abs() % 50,
    ),
    shape=lambda x, *_: x.shape,
    is_default=lambda arguments: arguments[2:] == PLAIN_LOSS,
    # Under autocast on a GPU, torch rounds logarithms of probabilities to the dtype of the logits.
    is_more_exact=True,
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
    TORCHS.cross_entropy: (_LOSS,),
    TORCHS.cross_entropy_module: (_LOSS,),
    TORCHS.rms_norm: (_RMS_NORM,),
    TORCHS.layer_norm: (_LAYER_NORM,),
}
