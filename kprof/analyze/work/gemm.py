"""Work of matrix products."""

from __future__ import annotations

import math
from functools import partial

from kprof.analyze.work import Inputs, Model, Shape, Tensor, Work, broadcast


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
    return Work(2 * num_out * inner, moved, left.dtype)


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
    return Work(2 * num_out * x.shape[-1], moved, x.dtype)


def _scaled(inputs: Inputs, num_scales: int = 2) -> Work | None:
    """Model a product of quantized matrices with their scales; the result has two-byte elements.

    The type of the result is an argument that recorders write as a number; bf16 is the default
    of the callers in use, and for fp8 operands a wider one is rare.
    """
    a, b = inputs.tensor(0), inputs.tensor(1)
    if a is None or b is None:
        return None
    scales = [inputs.tensor(i) for i in range(2, 2 + num_scales)]
    extra = sum(s.bytes for s in scales if s is not None)
    return product_work(a, b, _OUT_BYTES_OF_SCALED, extra)


def _integer(inputs: Inputs) -> Work | None:
    """Model an int8 product into int32."""
    a, b = inputs.tensor(0), inputs.tensor(1)
    return None if a is None or b is None else product_work(a, b, 4)


def _scaled_into(inputs: Inputs) -> Work | None:
    """Model `out = a @ b` with scales, as serving libraries register it: the result is given."""
    out, a, b = inputs.tensor(0), inputs.tensor(1), inputs.tensor(2)
    if out is None or a is None or b is None:
        return None
    scales = [inputs.tensor(i) for i in (3, 4)]
    extra = sum(s.bytes for s in scales if s is not None)
    return product_work(a, b, out.element_bytes, extra)


def _linear_backward(inputs: Inputs) -> Work | None:
    """Model the gradients of a linear layer to its input and its weight."""
    x, grad, weight = inputs.tensor(0), inputs.tensor(1), inputs.tensor(2)
    if x is None or grad is None or weight is None or len(weight.shape) != 2:
        return None
    mask = inputs.value(3)
    wanted = mask if isinstance(mask, list) else [True, True, True]
    flops = 2 * grad.numel * weight.shape[1] * (bool(wanted[0]) + bool(wanted[1]))
    moved = grad.bytes + x.bytes * (1 + wanted[0]) + weight.bytes * (1 + wanted[1])
    return Work(flops, moved, x.dtype)


def _products_of_groups(inputs: Inputs) -> Work | None:
    """Model a grouped product of tokens (rows, inner) by (groups, inner, columns) matrices.

    Each row meets one group's matrix; every matrix is read once.
    """
    a, b = inputs.tensor(0), inputs.tensor(1)
    if a is None or b is None or len(a.shape) != 2 or len(b.shape) != 3:
        return None
    shape: Shape = (a.shape[0], b.shape[2])
    num_out = math.prod(shape)
    return Work(2 * num_out * a.shape[1], a.bytes + b.bytes + 2 * num_out, a.dtype)


_OUT_BYTES_OF_SCALED = 2.0

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
    "aten::mkldnn_linear_backward": _linear_backward,
    "aten::linear_backward": _linear_backward,
    "mkldnn::_linear_pointwise": _linear,
    "mkl::_mkl_linear": partial(_linear, weight=2, bias=3),
    "aten::_weight_int8pack_mm": _linear,
    "aten::_scaled_mm": _scaled,
    "aten::_int_mm": _integer,
    "aten::_grouped_mm": _products_of_groups,
    "aten::_scaled_grouped_mm": _products_of_groups,
    "_C::cutlass_scaled_mm": _scaled_into,
}
