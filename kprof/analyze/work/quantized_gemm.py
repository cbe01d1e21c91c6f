"""Work of matrix multiplications (GEMM) with quantized operands, as libraries register them.

The FLOPs are those of the product; of a matrix whose numbers share elements the sizes follow from
the other tensors.
"""

from __future__ import annotations

import math
from functools import partial

from kprof.analyze.element_type import NUMBERED, size_bytes
from kprof.analyze.work import Inputs, Model, Tensor, Work, at_least
from kprof.analyze.work.gemm import product_work

_SMALL_INTEGERS_IN_ONE = 8  # 4-bit numbers in a 32-bit element


def _scaled_into(inputs: Inputs) -> Work | None:
    """Model `out = a @ b` with scales, where the result is given."""
    out, a, b = (inputs.tensor(i) for i in range(3))
    if out is None or a is None or b is None:
        return None
    scales = [inputs.tensor(i) for i in (3, 4)]
    extra = sum(s.bytes for s in scales if s is not None)
    return product_work(a, b, out.element_bytes, extra)


def _scaled(inputs: Inputs, out_dtype: int) -> Work | None:
    """Model `a @ b` with scales into the type asked for."""
    a, b = inputs.tensor(0), inputs.tensor(1)
    if a is None or b is None:
        return None
    scales = [inputs.tensor(i) for i in (2, 3)]
    extra = sum(s.bytes for s in scales if s is not None)
    number = inputs.value(out_dtype)
    if number not in NUMBERED:
        return at_least(product_work(a, b, 1, extra))
    return product_work(a, b, size_bytes(NUMBERED[number]), extra)


def _small_floats_into(inputs: Inputs) -> Work | None:
    """Model a product of transposed 4-bit floats, two in a byte: (m, k/2) by (n, k/2)."""
    out, a, b = (inputs.tensor(i) for i in range(3))
    if out is None or a is None or b is None or a.shape[-1] != b.shape[-1]:
        return None
    scales = [inputs.tensor(i) for i in (3, 4)]
    extra = sum(s.bytes for s in scales if s is not None)
    flops = 2 * out.numel * 2 * a.shape[-1]
    return Work(flops, a.bytes + b.bytes + extra + out.written_as(), "fp4")


def _product_of(x: Tensor, weight: Tensor, columns: int, extra: int) -> Work:
    """Return the work of x (…, k) by a packed matrix of so many columns; the result as x."""
    num_out = x.numel // max(x.shape[-1], 1) * columns
    moved = x.bytes + weight.bytes + extra + math.ceil(num_out * x.element_bytes)
    return Work(2 * num_out * x.shape[-1], moved, x.dtype)


def _weights_of_four_bits(inputs: Inputs) -> Work | None:
    """Model PyTorch's: scale and zero point of each group stand as (groups, columns, 2)."""
    x, weight, scales = inputs.tensor(0), inputs.tensor(1), inputs.tensor(3)
    if x is None or weight is None or scales is None or len(scales.shape) != 3 or not x.shape:
        return None
    return _product_of(x, weight, scales.shape[1], scales.bytes)


def _packed_columns(
    inputs: Inputs, weight: int, others: tuple[int, ...], along: int
) -> Work | None:
    """Model a product with 4-bit integers packed into 32-bit ones along a dimension."""
    x, packed = inputs.tensor(0), inputs.tensor(weight)
    if x is None or packed is None or len(packed.shape) != 2 or not x.shape:
        return None
    columns = packed.shape[1] * (_SMALL_INTEGERS_IN_ONE if along == 1 else 1)
    extra = sum(t.bytes for i in others if (t := inputs.tensor(i)) is not None)
    return _product_of(x, packed, columns, extra)


def _row_of_four_bits(inputs: Inputs) -> Work | None:
    """Model a vector by a matrix of 4-bit floats, whose shape is an argument."""
    x, packed, shape, scales = inputs.tensor(0), inputs.tensor(1), inputs.value(2), inputs.tensor(3)
    if x is None or packed is None or not isinstance(shape, list) or not shape or not x.shape:
        return None
    return _product_of(x, packed, shape[0], scales.bytes if scales else 0)


def _unpacked(inputs: Inputs, scales: int, shape: int, dtype: int) -> Work | None:
    """Model turning 4-bit floats into the type and shape asked for."""
    x, scale = inputs.tensor(0), inputs.tensor(scales)
    sizes, number = inputs.value(shape), inputs.value(dtype)
    if x is None or not isinstance(sizes, list) or number not in NUMBERED:
        return None
    written = math.ceil(math.prod(sizes) * size_bytes(NUMBERED[number]))
    return Work(math.prod(sizes), x.bytes + (scale.bytes if scale else 0) + written, "fp32")


def _integers(inputs: Inputs) -> Work | None:
    """Model an int8 product with a transposed matrix into int32."""
    x, weight = inputs.tensor(0), inputs.tensor(1)
    if x is None or weight is None or not x.shape or len(weight.shape) != 2:
        return None
    num_out = x.numel // max(x.shape[-1], 1) * weight.shape[0]
    return Work(2 * num_out * x.shape[-1], x.bytes + weight.bytes + 4 * num_out, "int8")


def _by_rows(inputs: Inputs) -> Work | None:
    """Model quantizing to int8 with a scale for each row."""
    x = inputs.tensor(0)
    if x is None or not x.shape:
        return None
    num_rows = x.numel // max(x.shape[-1], 1)
    return Work(2 * x.numel, x.bytes + x.numel + 4 * num_rows, "fp32")


MODELS: dict[str, Model] = {
    "aten::_weight_int4pack_mm": _weights_of_four_bits,
    "_C::cutlass_scaled_mm": _scaled_into,
    "_C::cutlass_scaled_mm_azp": _scaled_into,
    "_C::cutlass_scaled_fp4_mm": _small_floats_into,
    "_C::awq_gemm": partial(_packed_columns, weight=1, others=(2, 3), along=1),
    "_C::gptq_gemm": partial(_packed_columns, weight=1, others=(2, 3, 4), along=0),
    "sgl_kernel::fp8_scaled_mm": partial(_scaled, out_dtype=4),
    "sgl_kernel::int8_scaled_mm": partial(_scaled, out_dtype=4),
    "sgl_kernel::fp8_blockwise_scaled_mm": partial(_scaled, out_dtype=4),
    "bitsandbytes::int8_linear_matmul": _integers,
    "bitsandbytes::int8_vectorwise_quant": _by_rows,
    "bitsandbytes::gemv_4bit": _row_of_four_bits,
    "bitsandbytes::dequantize_4bit": partial(_unpacked, scales=1, shape=4, dtype=5),
}
