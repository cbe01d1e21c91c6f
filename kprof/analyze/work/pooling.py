"""Work of pooling and resampling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from kprof.analyze.work import Inputs, Model, Tensor, Work, vector_dtype
from kprof.analyze.work.convolution import output_extent

_INDEX_BYTES = 8


def _extents(value: object, num_dims: int) -> Sequence[int] | None:
    """Return one integer per dimension; a single recorded one stands for all."""
    listed = [value] if isinstance(value, int) else value
    if not isinstance(listed, list) or not listed:
        return None
    return listed * num_dims if len(listed) == 1 else listed


def _window(inputs: Inputs, num_dims: int, has_indices: bool) -> Work | None:
    """Model a maximum or a mean over windows, with the place of each maximum where asked for."""
    x = inputs.tensor(0)
    if x is None or len(x.shape) < num_dims:
        return None
    kernel = _extents(inputs.value(1), num_dims)
    stride = _extents(inputs.value(2), num_dims) or kernel
    padding = _extents(inputs.value(3), num_dims)
    dilation = _extents(inputs.value(4), num_dims) if has_indices else [1] * num_dims
    if kernel is None or stride is None or padding is None or dilation is None:
        return None
    each = zip(x.shape[-num_dims:], kernel, padding, stride, dilation, strict=True)
    num_out = math.prod(x.shape[:-num_dims]) * math.prod(output_extent(*sizes) for sizes in each)
    written = num_out * (x.element_bytes + (_INDEX_BYTES if has_indices else 0))
    return Work(num_out * math.prod(kernel), x.bytes + math.ceil(written), vector_dtype(x.dtype))


def _backward(inputs: Inputs, indices: int | None = None) -> Work | None:
    """Model its backward: gradient (and places) read, the input's gradient written."""
    grad, x = inputs.tensor(0), inputs.tensor(1)
    if grad is None or x is None:
        return None
    places = inputs.tensor(indices) if indices is not None else None
    moved = grad.bytes + (places.bytes if places is not None else 0) + x.written_as()
    return Work(max(grad.numel, x.numel), moved, vector_dtype(x.dtype))


def _to_size(inputs: Inputs, flops_each: int) -> Work | None:
    """Model a result whose last dimensions are the second argument."""
    x, size = inputs.tensor(0), inputs.value(1)
    if x is None or not isinstance(size, list) or len(size) > len(x.shape):
        return None
    out = Tensor((*x.shape[: len(x.shape) - len(size)], *size), x.dtype)
    flops = flops_each * max(x.numel, out.numel)
    return Work(flops, x.bytes + out.written_as(), vector_dtype(x.dtype))


def _from_size(inputs: Inputs) -> Work | None:
    """Model the backward of resampling: the shape that is written is the third argument."""
    grad, size = inputs.tensor(0), inputs.value(2)
    if grad is None or not isinstance(size, list):
        return None
    written = math.ceil(math.prod(size) * grad.element_bytes)
    return Work(max(grad.numel, math.prod(size)), grad.bytes + written, vector_dtype(grad.dtype))


MODELS: dict[str, Model] = {
    "aten::max_pool2d_with_indices": partial(_window, num_dims=2, has_indices=True),
    "aten::max_pool3d_with_indices": partial(_window, num_dims=3, has_indices=True),
    "aten::max_pool2d_with_indices_backward": partial(_backward, indices=7),
    "aten::max_pool3d_with_indices_backward": partial(_backward, indices=7),
    "aten::avg_pool2d": partial(_window, num_dims=2, has_indices=False),
    "aten::avg_pool3d": partial(_window, num_dims=3, has_indices=False),
    "aten::avg_pool2d_backward": _backward,
    "aten::avg_pool3d_backward": _backward,
    "aten::_adaptive_avg_pool2d": partial(_to_size, flops_each=1),
    "aten::_adaptive_avg_pool2d_backward": _backward,
    "aten::upsample_nearest1d": partial(_to_size, flops_each=0),
    "aten::upsample_nearest2d": partial(_to_size, flops_each=0),
    "aten::upsample_nearest3d": partial(_to_size, flops_each=0),
    "aten::upsample_bilinear2d": partial(_to_size, flops_each=8),
    "aten::upsample_bicubic2d": partial(_to_size, flops_each=40),
    "aten::upsample_nearest1d_backward": _from_size,
    "aten::upsample_nearest2d_backward": _from_size,
    "aten::upsample_nearest3d_backward": _from_size,
    "aten::upsample_bilinear2d_backward": _from_size,
}
