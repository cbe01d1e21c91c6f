"""Work of matrix multiplications (GEMM)."""

from __future__ import annotations

import math
from functools import partial

from kprof.analyze.element_type import NUMBERED, computed_in, size_bytes
from kprof.analyze.work import (
    Inputs,
    Model,
    Tensor,
    Work,
    at_least,
    broadcast,
    multiply_add_flops,
)


def product_work(
    left: Tensor, right: Tensor, out_bytes_each: float, extra_bytes: int = 0
) -> Work | None:
    """Return the work of `left @ right` over broadcast batches; None if they do not fit.

    `extra_bytes` are those of further inputs, such as a bias.
    """
    if len(left.shape) < 2 or len(right.shape) < 2 or left.shape[-1] != right.shape[-2]:
        return None
    batch = broadcast([left.shape[:-2], right.shape[:-2]])
    rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    num_out = math.prod(batch) * rows * columns
    moved = left.bytes + right.bytes + extra_bytes + math.ceil(num_out * out_bytes_each)
    return Work(num_out * inner * _flops_each(left), moved, computed_in(left.dtype))


def _flops_each(operand: Tensor) -> int:
    """Return the FLOPs for each element of `operand` that a result takes in."""
    packed = 2 if operand.dtype == "fp4x2" else 1
    return packed * multiply_add_flops(operand.dtype)


def _product(inputs: Inputs, left: int, right: int, added: int | None = None) -> Work | None:
    """Model `added + left @ right` from the positions of the arguments."""
    a, b = inputs.tensor(left), inputs.tensor(right)
    if a is None or b is None:
        return None
    c = inputs.tensor(added) if added is not None else None
    return product_work(a, b, a.element_bytes, c.bytes if c is not None else 0)


def _matmul(inputs: Inputs) -> Work | None:
    """Model `torch.matmul`, where a vector stands for a matrix of one row or column."""
    a, b = inputs.tensor(0), inputs.tensor(1)
    if a is None or b is None:
        return None
    left, right = _as_row(a), _as_column(b)
    return product_work(left, right, a.element_bytes)


def _dot(inputs: Inputs) -> Work | None:
    """Model the product of two vectors."""
    a, b = inputs.tensor(0), inputs.tensor(1)
    if a is None or b is None:
        return None
    return product_work(_as_row(a), _as_column(b), a.element_bytes)


def _addmv(inputs: Inputs) -> Work | None:
    """Model `added + matrix @ vector`."""
    added, a, b = inputs.tensor(0), inputs.tensor(1), inputs.tensor(2)
    if added is None or a is None or b is None:
        return None
    return product_work(a, _as_column(b), a.element_bytes, added.bytes)


def _as_row(vector: Tensor) -> Tensor:
    return Tensor((1, *vector.shape), vector.dtype) if len(vector.shape) == 1 else vector


def _as_column(vector: Tensor) -> Tensor:
    return Tensor((*vector.shape, 1), vector.dtype) if len(vector.shape) == 1 else vector


def _linear(inputs: Inputs, weight: int = 1, bias: int = 2) -> Work | None:
    """Model `x @ weight.T + bias`, with any leading dimensions of x."""
    x, w = inputs.tensor(0), inputs.tensor(weight)
    if x is None or w is None or not x.shape or len(w.shape) != 2 or x.shape[-1] != w.shape[1]:
        return None
    added = inputs.tensor(bias)
    rows = math.prod(x.shape[:-1])
    num_out = rows * w.shape[0]
    out_bytes = math.ceil(num_out * x.element_bytes)
    moved = x.bytes + w.bytes + (added.bytes if added is not None else 0) + out_bytes
    return Work(num_out * x.shape[-1] * _flops_each(x), moved, computed_in(x.dtype))


def _scaled(inputs: Inputs) -> Work | None:
    """Model a product of quantized matrices with their scales, the result in the type asked for.

    The arguments after the scales are bias, scale of the result, type of the result.
    """
    a, b = inputs.tensor(0), inputs.tensor(1)
    if a is None or b is None:
        return None
    others = [inputs.tensor(i) for i in range(2, 6)]
    extra = sum(t.bytes for t in others if t is not None)
    out_bytes = _asked_bytes(inputs, 6, a)
    if out_bytes is None:
        return at_least(product_work(a, b, 1, extra))
    return product_work(a, b, out_bytes, extra)


def _asked_bytes(inputs: Inputs, index: int, otherwise: Tensor) -> float | None:
    """Return an element's bytes in the type that an argument asks for.

    It is `otherwise`'s where no other is asked for, and None where that was not recorded of an
    operand so narrow that the result is mostly of another type.
    """
    if index >= len(inputs.values):
        return None if otherwise.element_bytes <= 1 else otherwise.element_bytes
    number = inputs.value(index)
    return size_bytes(NUMBERED[number]) if number in NUMBERED else otherwise.element_bytes


def _added_up(inputs: Inputs) -> Work | None:
    """Model `addbmm`: the products of all batches are added up."""
    added, a, b = (inputs.tensor(i) for i in range(3))
    if added is None or a is None or b is None or len(a.shape) != 3 or len(b.shape) != 3:
        return None
    num_out = a.shape[1] * b.shape[2]
    moved = added.bytes + a.bytes + b.bytes + math.ceil(num_out * a.element_bytes)
    return Work(a.numel * b.shape[2] * _flops_each(a), moved, computed_in(a.dtype))


def _outer(inputs: Inputs) -> Work | None:
    """Model the outer product of the last two of its tensors, with a matrix added where given."""
    given = inputs.tensors()
    if not 2 <= len(given) <= 3 or len(given[-1].shape) != 1 or len(given[-2].shape) != 1:
        return None
    num_out = given[-2].numel * given[-1].numel
    written = math.ceil(num_out * given[-1].element_bytes)
    moved = sum(t.bytes for t in given) + written
    return Work(num_out * _flops_each(given[-1]), moved, computed_in(given[-1].dtype))


def _integer(inputs: Inputs) -> Work | None:
    """Model an int8 product into int32."""
    a, b = inputs.tensor(0), inputs.tensor(1)
    return None if a is None or b is None else product_work(a, b, 4)


def _linear_backward(inputs: Inputs) -> Work | None:
    """Model the gradients of a linear layer to its input and its weight."""
    x, grad, weight = inputs.tensor(0), inputs.tensor(1), inputs.tensor(2)
    if x is None or grad is None or weight is None or len(weight.shape) != 2:
        return None
    mask = inputs.value(3)
    wanted = mask if isinstance(mask, list) else [True, True, True]
    flops = _flops_each(x) * grad.numel * weight.shape[1] * (bool(wanted[0]) + bool(wanted[1]))
    moved = grad.bytes + x.bytes * (1 + wanted[0]) + weight.bytes * (1 + wanted[1])
    return Work(flops, moved, computed_in(x.dtype))


def _products_of_groups(inputs: Inputs, offsets: int, out_dtype: int) -> Work | None:
    """Model a product for each group, where rows, columns or the inner dimension are split up.

    A matrix of three dimensions has one matrix for each group; of one with two, a group has
    those rows (or columns) that the offsets say, and together they are all.
    """
    a, b, ends = inputs.tensor(0), inputs.tensor(1), inputs.tensor(offsets)
    if a is None or b is None or min(len(a.shape), len(b.shape)) < 2:
        return None
    rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    num_groups = a.shape[0] if len(a.shape) == 3 else b.shape[0] if len(b.shape) == 3 else None
    if len(a.shape) == len(b.shape) == 2 and ends is not None:
        num_groups = ends.numel
    if num_groups is None or inner != b.shape[-2]:
        return None
    is_split = len(a.shape) == 2 or len(b.shape) == 2
    num_products = rows * inner * columns * (1 if is_split else num_groups)
    num_out = rows * columns * (1 if len(a.shape) != len(b.shape) else num_groups)
    out_bytes = _asked_bytes(inputs, out_dtype, a)
    others = [t for i in range(2, out_dtype) if (t := inputs.tensor(i)) is not None]
    moved = a.bytes + b.bytes + sum(t.bytes for t in others)
    moved += math.ceil(num_out * (1 if out_bytes is None else out_bytes))
    work = Work(num_products * _flops_each(a), moved, computed_in(a.dtype))
    return at_least(work) if out_bytes is None else work


MODELS: dict[str, Model] = {
    "aten::mm": partial(_product, left=0, right=1),
    "aten::bmm": partial(_product, left=0, right=1),
    "aten::matmul": _matmul,
    "aten::addmm": partial(_product, added=0, left=1, right=2),
    "aten::addmm_": partial(_product, added=0, left=1, right=2),
    "aten::_addmm_activation": partial(_product, added=0, left=1, right=2),
    "aten::baddbmm": partial(_product, added=0, left=1, right=2),
    "aten::baddbmm_": partial(_product, added=0, left=1, right=2),
    "aten::mv": _matmul,
    "aten::addmv": _addmv,
    "aten::addmv_": _addmv,
    "aten::dot": _dot,
    "aten::vdot": _dot,
    "aten::linear": _linear,
    "aten::mkldnn_linear": _linear,
    "vllm::rocm_unquantized_gemm": _linear,
    "_rocm_C::wvSplitK": _linear,
    "aten::mkldnn_linear_backward": _linear_backward,
    "aten::linear_backward": _linear_backward,
    "mkldnn::_linear_pointwise": _linear,
    "mkl::_mkl_linear": partial(_linear, weight=2, bias=3),
    "aten::_weight_int8pack_mm": _linear,
    "aten::_scaled_mm": _scaled,
    "aten::_int_mm": _integer,
    "aten::_grouped_mm": partial(_products_of_groups, offsets=2, out_dtype=4),
    "aten::_scaled_grouped_mm": partial(_products_of_groups, offsets=4, out_dtype=7),
    "aten::addbmm": _added_up,
    "aten::addr": _outer,
    "aten::ger": _outer,
}
