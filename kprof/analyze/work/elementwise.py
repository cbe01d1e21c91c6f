"""Work of operators that treat every element alike, on one tensor or on lists of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from kprof.analyze.element_type import COMPLEX, FLOATING
from kprof.analyze.work import Inputs, Model, Tensor, Work, broadcast, promote, vector_dtype

# Operators by the number of their arguments; a tensor after those is where the result goes.
_BY_NUM_ARGUMENTS: dict[int, str] = {
    1: "abs acos angle asin atan bitwise_not ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2"
    " expm1 floor frac hardsigmoid hardswish isfinite isinf isnan lgamma log log10 log1p log2"
    " log_sigmoid_forward logical_not mish neg reciprocal relu relu6 rsqrt selu sgn sigmoid sign"
    " i0 isneginf isposinf conj_physical special_erfcx special_i1 special_ndtri asinh acosh atanh"
    " rad2deg signbit silu sin sinc sinh sqrt square tan tanh trunc",
    2: "atan2 bitwise_and bitwise_or bitwise_xor clamp_max clamp_min copysign div eq floor_divide"
    " fmax fmin fmod ge gelu gt le leaky_relu logical_and logical_or logical_xor lt maximum minimum"
    " mul ne polar pow remainder round sigmoid_backward silu_backward mish_backward tanh_backward"
    " xlogy logit __and__ __or__ __xor__ __lshift__ __rshift__ hardswish_backward"
    " hardsigmoid_backward logaddexp logaddexp2 celu hardshrink softshrink nextafter"
    " gcd lcm heaviside igamma igammac bitwise_left_shift bitwise_right_shift glu_backward"
    " __ilshift__ __irshift__ special_xlog1py special_zeta complex",
    3: "add clamp gelu_backward hardtanh lerp masked_fill prelu_kernel rsub softplus sub threshold"
    " threshold_backward where logit_backward hypot"
    " hardshrink_backward softshrink_backward",
    4: "addcdiv addcmul elu hardtanh_backward leaky_relu_backward nan_to_num softplus_backward",
    6: "elu_backward",
}

_TO_BOOL = (
    "eq ne lt le gt ge isnan isinf isfinite isneginf isposinf signbit"
    " logical_not logical_and logical_or logical_xor"
)

# They turn integers into fp32.
_TO_FLOAT = (
    "acos acosh angle asin asinh atan atan2 atanh copysign cos cosh deg2rad digamma div erf erfc"
    " erfinv exp exp2 expm1 i0 lgamma log log10 log1p log2 logit rad2deg reciprocal rsqrt sigmoid"
    " sin sinc sinh special_erfcx special_i1 special_ndtri special_xlog1py special_zeta sqrt tan"
    " tanh xlogy"
)

# FLOPs of one element where they are not 1.
_FLOPS = {"addcmul": 3, "addcdiv": 3, "lerp": 3, "nan_to_num": 0, "where": 0, "masked_fill": 0}


_MAKES_COMPLEX = frozenset({"complex", "polar"})
_MAKES_COMPLEX_OF = {"fp16": "complex32", "fp32": "complex64", "fp64": "complex128"}

# A complex multiplication: four multiplications and two additions.
_PRODUCTS = frozenset({"mul", "div", "addcmul", "addcdiv"})


def elementwise_work(read: Sequence[Tensor], written_bytes: int, num_flops: int) -> Work:
    """Return the work of reading tensors and writing a result."""
    dtype = vector_dtype(promote(read)) if read else "fp32"
    moved = sum(t.bytes for t in read) + written_bytes
    return Work(num_flops, moved, dtype, written=written_bytes)


def _elementwise(inputs: Inputs, name: str, num_arguments: int, in_place: bool) -> Work | None:
    """Model one result per element of the inputs' common shape."""
    given = [inputs.tensor(i) for i in range(num_arguments)]
    read = [t for t in given if t is not None]
    if not read:
        return None
    shape = broadcast([t.shape for t in read])
    out = inputs.tensor(num_arguments)
    if in_place:
        out = read[0]
    if name in _MAKES_COMPLEX and not in_place:
        out = Tensor(shape, _MAKES_COMPLEX_OF.get(read[0].dtype, "complex64"))
    if out is None:
        operands = read[1:] if name == "where" and len(read) > 1 else read
        # Its third argument says how a quotient is rounded: that of integers is one.
        is_rounded = name == "div" and len(inputs.shapes) > 2
        out = Tensor(shape, _result_dtype(name, promote(operands), is_rounded=is_rounded))
    elif not out.numel:
        # An empty tensor for the result grows to what there is, after it was recorded.
        out = Tensor(shape, out.dtype)
    flops_each = _FLOPS.get(name, 1)
    if out.dtype in COMPLEX:
        flops_each *= 6 if name in _PRODUCTS else 2
    return elementwise_work(read, out.written_as(), out.numel * flops_each)


def _result_dtype(name: str, operands: str, *, is_rounded: bool) -> str:
    """Return the type of the result of operands that are promoted to one."""
    if name in _TO_BOOL.split():
        return "bool"
    makes_float = name in _TO_FLOAT.split() and operands not in FLOATING and not is_rounded
    return "fp32" if makes_float else operands


def _of_gradient(inputs: Inputs) -> Work | None:
    """Model a gradient from the one of the result and the input, the first two tensors."""
    grad, x = inputs.tensor(0), inputs.tensor(1)
    if grad is None or x is None:
        return None
    return elementwise_work([grad, x], grad.written_as(), grad.numel)


def _gated(inputs: Inputs) -> Work | None:
    """Model `glu`: the result has half of the input's elements."""
    x = inputs.tensor(0)
    return None if x is None else elementwise_work([x], x.written_as() // 2, x.numel)


def foreach_work(inputs: Inputs, num_read: int, num_written: int, flops_each: int) -> Work | None:
    """Return the work on lists of tensors, None where their shapes or types were not recorded.

    Lists have equal shapes; `num_read` and `num_written` count how many of them are touched.
    """
    shapes = inputs.list_shapes(0)
    if not shapes or inputs.element_bytes is None:
        return None
    num_elements = sum(math.prod(s) for s in shapes)
    each = math.ceil(num_elements * inputs.element_bytes)
    written = each * num_written
    return Work(num_elements * flops_each, each * num_read + written, "fp32", written=written)


def _foreach(inputs: Inputs, num_read: int | None, num_written: int) -> Work | None:
    """Model one result per element; None reads as many lists as were given."""
    num_lists = sum(bool(inputs.list_shapes(i)) for i in range(len(inputs.shapes)))
    return foreach_work(inputs, num_lists if num_read is None else num_read, num_written, 1)


_FOREACH = (
    "abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min cos cosh div erf erfc exp"
    " expm1 floor frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow"
    " reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc"
)

MODELS: dict[str, Model] = {
    f"aten::{name}{suffix}": partial(
        _elementwise, name=name, num_arguments=num_arguments, in_place=bool(suffix)
    )
    for num_arguments, names in _BY_NUM_ARGUMENTS.items()
    for name in names.split()
    for suffix in ("", "_")
}
MODELS |= {
    f"aten::_foreach_{name}{suffix}": partial(_foreach, num_read=None, num_written=1)
    for name in _FOREACH.split()
    for suffix in ("", "_")
}
MODELS |= {
    "aten::_foreach_copy_": partial(_foreach, num_read=1, num_written=1),
    "aten::_foreach_zero_": partial(_foreach, num_read=0, num_written=1),
    "aten::_foreach_clone": partial(_foreach, num_read=1, num_written=1),
    "aten::_foreach_norm": partial(_foreach, num_read=1, num_written=0),
    "aten::_foreach_max": partial(_foreach, num_read=1, num_written=0),
    "aten::_amp_foreach_non_finite_check_and_unscale_": partial(
        _foreach, num_read=1, num_written=1
    ),
    "aten::glu": _gated,
    "aten::log_sigmoid_backward": _of_gradient,
    "aten::_amp_update_scale_": _of_gradient,
}
