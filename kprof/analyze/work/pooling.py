"""Work of pooling or resampling."""

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


def _to_size(inputs: Inputs, flops_each: int, index_bytes: int = 0) -> Work | None:
    """Model a result whose last dimensions are the second argument, maybe with places."""
    x, size = inputs.tensor(0), inputs.value(1)
    if x is None or not isinstance(size, list) or len(size) > len(x.shape):
        return None
    out = Tensor((*x.shape[: len(x.shape) - len(size)], *size), x.dtype)
    flops = flops_each * max(x.numel, out.numel)
    written = out.written_as() + index_bytes * out.numel
    return Work(flops, x.bytes + written, vector_dtype(x.dtype))


def _from_size(inputs: Inputs) -> Work | None:
    """Model the backward of resampling: the shape that is written is the third argument."""
    grad, size = inputs.tensor(0), inputs.value(2)
    if grad is None or not isinstance(size, list):
        return None
    written = math.ceil(math.prod(size) * grad.element_bytes)
    return Work(max(grad.numel, math.prod(size)), grad.bytes + written, vector_dtype(grad.dtype))


def _widened(inputs: Inputs) -> Work | None:
    """Model padding: the second argument tells by how much, from the last dimension on."""
    x, padding = inputs.tensor(0), inputs.value(1)
    if x is None or not isinstance(padding, list) or len(padding) > 2 * len(x.shape):
        return None
    sizes = list(x.shape)
    for place, (before, after) in enumerate(zip(padding[::2], padding[1::2], strict=True), 1):
        sizes[-place] += before + after
    return Work(0, x.bytes + Tensor(tuple(sizes), x.dtype).bytes)


def _sampled(inputs: Inputs, num_dims: int) -> Work | None:
    """Model reading an image at the places of a grid, between its points."""
    x, grid = inputs.tensor(0), inputs.tensor(1)
    if x is None or grid is None or len(x.shape) < 2:
        return None
    out = Tensor((*x.shape[:2], *grid.shape[1:-1]), x.dtype)
    moved = x.bytes + grid.bytes + out.bytes
    return Work(2 ** (num_dims + 1) * out.numel, moved, vector_dtype(x.dtype))


def _sampled_backward(inputs: Inputs, num_dims: int) -> Work | None:
    """Model its backward: gradient, image and grid read, the gradients of both written."""
    grad, x, grid = (inputs.tensor(i) for i in range(3))
    if grad is None or x is None or grid is None:
        return None
    mask = inputs.value(6)
    to_image = not isinstance(mask, list) or bool(mask[0])
    written = x.written_as() * to_image + grid.written_as()
    moved = grad.bytes + x.bytes + grid.bytes + written
    return Work(2 ** (num_dims + 2) * grad.numel, moved, vector_dtype(x.dtype))


def _columns(inputs: Inputs) -> Work | None:
    """Model laying out the windows of an image as columns, each element read once."""
    x = inputs.tensor(0)
    if x is None or len(x.shape) < 3:
        return None
    kernel, dilation, padding, stride = (_extents(inputs.value(i), 2) for i in range(1, 5))
    if kernel is None or dilation is None or padding is None or stride is None:
        return None
    each = zip(x.shape[-2:], kernel, padding, stride, dilation, strict=True)
    num_windows = math.prod(output_extent(*sizes) for sizes in each)
    num_out = math.prod(x.shape[:-2]) * math.prod(kernel) * num_windows
    return Work(0, x.bytes + math.ceil(num_out * x.element_bytes))


def _from_columns(inputs: Inputs) -> Work | None:
    """Model adding up such columns to an image of the size that is asked for."""
    x, size, kernel = inputs.tensor(0), inputs.value(1), _extents(inputs.value(2), 2)
    if x is None or not isinstance(size, list) or kernel is None or len(x.shape) < 2:
        return None
    channels = x.shape[-2] // max(math.prod(kernel), 1)
    out = Tensor((*x.shape[:-2], channels, *size), x.dtype)
    return Work(x.numel, x.bytes + out.bytes, vector_dtype(x.dtype))


_RESAMPLING = {
    "nearest1d": 0,
    "nearest2d": 0,
    "nearest3d": 0,
    "linear1d": 4,
    "bilinear2d": 8,
    "trilinear3d": 16,
    "bicubic2d": 40,
    "nearest_exact1d": 0,
    "nearest_exact2d": 0,
    "nearest_exact3d": 0,
    "bilinear2d_aa": 8,
    "bicubic2d_aa": 40,
    "lanczos2d_aa": 72,
}
_PADDING = [f"{how}_pad{n}d" for how in ("reflection", "replication") for n in (1, 2, 3)]

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
    "aten::_adaptive_avg_pool3d": partial(_to_size, flops_each=1),
    "aten::_adaptive_avg_pool3d_backward": _backward,
    "aten::adaptive_max_pool2d": partial(_to_size, flops_each=1, index_bytes=_INDEX_BYTES),
    "aten::adaptive_max_pool3d": partial(_to_size, flops_each=1, index_bytes=_INDEX_BYTES),
    "aten::adaptive_max_pool2d_backward": partial(_backward, indices=2),
    "aten::adaptive_max_pool3d_backward": partial(_backward, indices=2),
    **{
        f"aten::{prefix}upsample_{name}": partial(_to_size, flops_each=flops_each)
        for name, flops_each in _RESAMPLING.items()
        for prefix in ("", "_")
    },
    **{
        f"aten::{prefix}upsample_{name}_backward": _from_size
        for name in _RESAMPLING
        for prefix in ("", "_")
    },
    **{f"aten::{name}": _widened for name in _PADDING},
    **{f"aten::{name}_backward": _backward for name in _PADDING},
    "aten::grid_sampler_2d": partial(_sampled, num_dims=2),
    "aten::grid_sampler_3d": partial(_sampled, num_dims=3),
    "aten::cudnn_grid_sampler": partial(_sampled, num_dims=2),
    "aten::grid_sampler_2d_backward": partial(_sampled_backward, num_dims=2),
    "aten::grid_sampler_3d_backward": partial(_sampled_backward, num_dims=3),
    "aten::im2col": _columns,
    "aten::col2im": _from_columns,
}
