"""Work of operators that move, set or draw elements.

Drawing random numbers takes integer arithmetic, which no FLOP count covers.
"""

from __future__ import annotations

import math
from functools import partial

from kprof.analyze.work import Inputs, Model, Work, vector_dtype

_DRAWING = "bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_"


def _copy(inputs: Inputs) -> Work | None:
    """Model `copy_(destination, source)`."""
    destination, source = inputs.tensor(0), inputs.tensor(1)
    if destination is None or source is None:
        return None
    written = destination.written_as()
    return Work(0, source.bytes + written, written=written)


def _set(inputs: Inputs) -> Work | None:
    """Model an operator that writes its first tensor and reads none."""
    target = inputs.tensor(0)
    return None if target is None else Work(0, target.bytes, written=target.bytes)


def _same_size(inputs: Inputs) -> Work | None:
    """Model a result that holds the elements of the first tensor in another order."""
    source = inputs.tensor(0)
    return None if source is None else Work(0, source.bytes + source.written_as())


def _range(inputs: Inputs) -> Work | None:
    """Model `arange(start, end, step, out=…)`."""
    start, end, step = (inputs.value(i) for i in range(3))
    out = inputs.tensor(3)
    if out is None or not all(isinstance(n, int | float) for n in (start, end, step)) or step == 0:
        return None
    count = max(math.ceil((end - start) / step), 0)
    return Work(0, math.ceil(count * out.element_bytes))


def _concatenate(inputs: Inputs) -> Work | None:
    """Model `cat` and `stack`: each element read once and written once.

    None where nothing tells the elements' size: recorders leave out the types in lists, and only a
    kernel's name makes up for it.
    """
    shapes = inputs.list_shapes(0)
    if not shapes or inputs.element_bytes is None:
        return None
    return Work(0, 2 * math.ceil(sum(math.prod(s) for s in shapes) * inputs.element_bytes))


def _triangle(inputs: Inputs, in_place: bool) -> Work | None:
    """Model `tril` and `triu`: half is read, all is written, or in place half is set."""
    source = inputs.tensor(0)
    if source is None:
        return None
    return Work(0, source.bytes // 2 + (0 if in_place else source.written_as()))


def _draw(inputs: Inputs) -> Work | None:
    """Model filling a tensor."""
    target = inputs.tensor(0)
    if target is None:
        return None
    return Work(0, target.written_as(), written=target.written_as())


def _drop(inputs: Inputs) -> Work | None:
    """Model dropout: the result and a mask of one byte for each element are written."""
    x = inputs.tensor(0)
    if x is None:
        return None
    return Work(x.numel, x.bytes + x.written_as() + x.numel, vector_dtype(x.dtype))


def _drop_backward(inputs: Inputs) -> Work | None:
    """Model its backward: gradient and mask read, the input's gradient written."""
    grad, mask = inputs.tensor(0), inputs.tensor(1)
    if grad is None or mask is None:
        return None
    return Work(grad.numel, grad.bytes + mask.bytes + grad.written_as(), vector_dtype(grad.dtype))


MODELS: dict[str, Model] = {
    "aten::copy_": _copy,
    "aten::_copy_from": _copy,
    "aten::fill_": _set,
    "aten::zero_": _set,
    "aten::eye": _set,
    "aten::arange": _range,
    "aten::cat": _concatenate,
    "aten::_cat": _concatenate,
    "aten::stack": _concatenate,
    "aten::tril": partial(_triangle, in_place=False),
    "aten::triu": partial(_triangle, in_place=False),
    "aten::tril_": partial(_triangle, in_place=True),
    "aten::triu_": partial(_triangle, in_place=True),
    "aten::_stack": _concatenate,
    "aten::_chunk_cat": _concatenate,
    "fsdp::chunk_cat": _concatenate,
    "aten::split_with_sizes_copy": _same_size,
    "fsdp::split_with_sizes_copy": _same_size,
    "aten::_transform_bias_rescale_qkv": _same_size,
    "aten::channel_shuffle": _same_size,
    "aten::pixel_shuffle": _same_size,
    "aten::pixel_unshuffle": _same_size,
    "aten::_nested_from_padded": _same_size,
    "aten::flip": _same_size,
    "aten::roll": _same_size,
    "aten::mkldnn_reorder_conv2d_weight": _same_size,
    "fbgemm::permute_pooled_embs_auto_grad": _same_size,
    "fbgemm::recat_embedding_grad_output_mixed_D_batch": _same_size,
    "torch::autograd::CppNode<fbgemm_gpu::PermutePooledEmbsFunction"
    "<&fbgemm_gpu::permute_pooled_embs_gpu> >": _same_size,
    **{f"aten::{name}": _draw for name in _DRAWING.split()},
    "aten::native_dropout": _drop,
    "aten::_fused_dropout": _drop,
    "aten::native_dropout_backward": _drop_backward,
    "aten::_masked_scale": _drop_backward,
}
