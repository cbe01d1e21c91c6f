"""Work of convolutions.

Every weight meets every output position once, 2 FLOPs each; a transposed convolution swaps the
roles of input and output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kprof.analyze.element_type import computed_in
from kprof.analyze.work import Inputs, Model, Shape, Tensor, Work, multiply_add_flops


@dataclass(frozen=True)
class Layout:
    """Positions of a convolution's arguments; None where the operator has no such one."""

    padding: int
    stride: int
    dilation: int | None
    bias: int | None = None
    transposed: int | None = None
    output_padding: int | None = None
    groups: int | None = None
    is_transposed: bool = False
    added: int | None = None
    """A tensor of the output's shape that is added to the result."""


def output_extent(size: int, kernel: int, padding: int, stride: int, dilation: int) -> int:
    """Return the length of one output dimension."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def touched_extent(size: int, kernel: int, padding: int, stride: int, dilation: int) -> int:
    """Return how many positions of one input dimension a convolution reads at all.

    A filter narrower than its stride skips some: a 1x1 filter of stride 2 reads every second one.
    So does a dilated filter with fewer results than its dilation.
    """
    num_out = output_extent(size, kernel, padding, stride, dilation)
    if num_out < 1:
        return 0
    has_no_holes = dilation <= num_out or kernel == 1
    if (stride == 1 and has_no_holes) or (dilation == 1 and kernel >= stride):
        last = (num_out - 1) * stride - padding + (kernel - 1) * dilation
        return max(0, min(size - 1, last) + 1)
    read = {o * stride - padding + k * dilation for o in range(num_out) for k in range(kernel)}
    return sum(0 <= position < size for position in read)


def transposed_extent(size: int, kernel: int, padding: int, stride: int, dilation: int) -> int:
    """Return the length of one output dimension of a transposed convolution, before its padding."""
    return (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1


def _forward(inputs: Inputs, layout: Layout) -> Work | None:
    """Model the forward operation: input, weight and bias read, the result written."""
    x, weight = inputs.tensor(0), inputs.tensor(1)
    if x is None or weight is None or len(x.shape) != len(weight.shape) or len(x.shape) < 3:
        return None
    is_transposed = layout.is_transposed or (
        layout.transposed is not None and bool(inputs.value(layout.transposed))
    )
    out = _output_shape(inputs, layout, x, weight, is_transposed)
    if out is None:
        return None
    bias = inputs.tensor(layout.bias) if layout.bias is not None else None
    added = inputs.tensor(layout.added) if layout.added is not None else None
    extra = sum(t.bytes for t in (bias, added) if t is not None)
    meets = math.prod(x.shape[2:]) if is_transposed else math.prod(out[2:])
    flops = multiply_add_flops(x.dtype) * x.shape[0] * meets * weight.numel
    out_bytes = math.ceil(math.prod(out) * x.element_bytes)
    read = x.bytes if is_transposed else _read_bytes(inputs, layout, x, weight)
    return Work(flops, read + weight.bytes + extra + out_bytes, computed_in(x.dtype))


def _read_bytes(inputs: Inputs, layout: Layout, x: Tensor, weight: Tensor) -> int:
    """Return the bytes of the input that the filter reaches."""
    geometry = _geometry(inputs, layout, len(x.shape) - 2)
    if geometry is None:
        return x.bytes
    touched = math.prod(
        touched_extent(*each) for each in zip(x.shape[2:], weight.shape[2:], *geometry, strict=True)
    )
    return x.bytes * touched // max(math.prod(x.shape[2:]), 1)


def _geometry(
    inputs: Inputs, layout: Layout, num_dims: int
) -> tuple[Sequence[int], Sequence[int], Sequence[int]] | None:
    """Return padding, stride and dilation of every dimension, or None if one was not recorded."""
    padding = _extents(inputs, layout.padding, num_dims)
    stride = _extents(inputs, layout.stride, num_dims)
    dilation = (
        [1] * num_dims if layout.dilation is None else _extents(inputs, layout.dilation, num_dims)
    )
    if padding is None or stride is None or dilation is None:
        return None
    return padding, stride, dilation


def _output_shape(
    inputs: Inputs, layout: Layout, x: Tensor, weight: Tensor, is_transposed: bool
) -> Shape | None:
    """Return the shape of the result, or None where stride or padding was not recorded."""
    num_dims = len(x.shape) - 2
    geometry = _geometry(inputs, layout, num_dims)
    if geometry is None:
        return None
    rule = transposed_extent if is_transposed else output_extent
    sizes = [rule(*each) for each in zip(x.shape[2:], weight.shape[2:], *geometry, strict=True)]
    if not is_transposed:
        return (x.shape[0], weight.shape[0], *sizes)
    more = _extents(inputs, layout.output_padding, num_dims) or [0] * num_dims
    groups = inputs.value(layout.groups) if layout.groups is not None else 1
    channels = weight.shape[1] * (groups if isinstance(groups, int) else 1)
    return (x.shape[0], channels, *(n + m for n, m in zip(sizes, more, strict=True)))


def _extents(inputs: Inputs, index: int | None, num_dims: int) -> Sequence[int] | None:
    """Return one integer per spatial dimension; a single recorded one stands for all."""
    value = inputs.value(index) if index is not None else None
    if isinstance(value, int):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(v, int) for v in value):
        return None
    found = value * num_dims if len(value) == 1 else value
    return found if len(found) == num_dims else None


def _backward(inputs: Inputs) -> Work | None:
    """Model the gradients that the mask asks for: of the input, of the weight, of the bias.

    Each of the first two is as many products as the forward operation, and an operation of its
    own that reads the result's gradient, as both products of a linear layer's backward pass do.
    Without a recorded mask all three are asked for.
    """
    grad, x, weight = inputs.tensor(0), inputs.tensor(1), inputs.tensor(2)
    if grad is None or x is None or weight is None or len(grad.shape) < 3:
        return None
    mask = inputs.value(10)
    to_input, to_weight, to_bias = mask if isinstance(mask, list) and len(mask) == 3 else (1, 1, 1)
    is_transposed = bool(inputs.value(7))
    meets = math.prod((x if is_transposed else grad).shape[2:])
    one_product = multiply_add_flops(x.dtype) * x.shape[0] * meets * weight.numel
    moved = grad.bytes * max(bool(to_input) + bool(to_weight), 1)
    moved += (weight.bytes + x.written_as()) * bool(to_input)
    read = x.bytes if is_transposed else _read_bytes(inputs, _BACKWARD, x, weight)
    moved += (read + weight.written_as()) * bool(to_weight)
    moved += math.ceil(grad.shape[1] * grad.element_bytes) * bool(to_bias)
    return Work(one_product * (bool(to_input) + bool(to_weight)), moved, computed_in(x.dtype))


_CONVOLUTION = Layout(
    bias=2, stride=3, padding=4, dilation=5, transposed=6, output_padding=7, groups=8
)
_BACKWARD = Layout(stride=4, padding=5, dilation=6)
_VENDOR = Layout(padding=2, stride=3, dilation=4)
_WITH_BIAS = Layout(bias=2, padding=3, stride=4, dilation=5)
_DEPTHWISE = Layout(bias=3, stride=4, padding=5, dilation=6)
_SLOW = Layout(bias=3, stride=4, padding=5, dilation=None)
_CONV_ND = Layout(bias=2, stride=3, padding=4, dilation=5)

_LAYOUTS: dict[str, Layout] = {
    "aten::conv1d": _CONV_ND,
    "aten::conv2d": _CONV_ND,
    "aten::conv3d": _CONV_ND,
    "aten::convolution": _CONVOLUTION,
    "aten::_convolution": _CONVOLUTION,
    "aten::convolution_overrideable": _CONVOLUTION,
    "aten::cudnn_convolution": _VENDOR,
    "aten::cudnn_convolution_relu": _CONV_ND,
    "aten::cudnn_convolution_add_relu": Layout(bias=4, stride=5, padding=6, dilation=7, added=2),
    "aten::cudnn_convolution_transpose": Layout(
        padding=2, output_padding=3, stride=4, dilation=5, groups=6, is_transposed=True
    ),
    "aten::miopen_convolution": _WITH_BIAS,
    "aten::miopen_depthwise_convolution": _WITH_BIAS,
    "aten::miopen_convolution_transpose": Layout(
        bias=2, padding=3, output_padding=4, stride=5, dilation=6, groups=7, is_transposed=True
    ),
    "aten::mkldnn_convolution": _WITH_BIAS,
    "mkldnn::_convolution_pointwise": _WITH_BIAS,
    "aten::_conv_depthwise2d": _DEPTHWISE,
    "aten::conv_depthwise3d": _DEPTHWISE,
    "aten::_slow_conv2d_forward": _SLOW,
    "aten::slow_conv3d_forward": _SLOW,
    "aten::thnn_conv2d": _SLOW,
}

MODELS: dict[str, Model] = {
    **{name: partial(_forward, layout=layout) for name, layout in _LAYOUTS.items()},
    "aten::convolution_backward": _backward,
    "aten::convolution_backward_overrideable": _backward,
}
