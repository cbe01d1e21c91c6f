"""The end of kernels that quantise rows to FP8: scales, and where values and scales are stored."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kprof.kernels._launch import Launcher, alignments, kind_of, next_power_of_two

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
# What a group of zeros is divided by; nothing but zeros is smaller in 16 bits.
LEAST = 1e-12
SIDE = 128
# A row has to fit the registers of one program.
MOST_COLUMNS = 65_536
ELEMENTS_PER_PROGRAM = 4_096
ELEMENTS_PER_WARP = 512
MOST_WARPS = 32


@triton.jit
def largest_of(x32, axis: tl.constexpr) -> tl.tensor:
    """Return the largest magnitude, NaN where there is one, as torch does."""
    magnitude = tl.abs(x32)
    largest = tl.max(magnitude, axis=axis)
    has_nan = tl.max((magnitude != magnitude).to(tl.int32), axis=axis) > 0
    return tl.where(has_nan, float("nan"), largest)


@triton.jit
def store_rows(
    x32,
    y_MN,
    scale_M,
    rows,
    num_rows,
    num_columns,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store whole rows as FP8, each with a scale."""
    columns = tl.arange(0, BLOCK)
    is_row = rows < num_rows
    mask = is_row[:, None] & (columns < num_columns)[None, :]
    largest = largest_of(x32, 1)
    largest = tl.where(largest < LEAST, LEAST, largest)
    y = x32 * tl.div_rn(LARGEST, largest)[:, None]
    tl.store(y_MN + rows[:, None] * num_columns + columns[None, :], y.to(tl.float8e4nv), mask)
    tl.store(scale_M + rows, largest * (1.0 / LARGEST), is_row)


@triton.jit
def store_quantized(
    x32,
    y_MN,
    scale_GM,
    rows,
    num_rows,
    num_columns,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store whole rows as FP8; every GROUP columns share a scale, which lie column by column."""
    columns = tl.arange(0, BLOCK)
    is_row = rows < num_rows
    groups = tl.arange(0, BLOCK // GROUP)
    grouped = tl.reshape(x32, (ROWS, BLOCK // GROUP, GROUP))
    largest = largest_of(grouped, 2)
    largest = tl.where(largest < LEAST, LEAST, largest)
    at = scale_GM + groups[None, :].to(tl.int64) * num_rows + rows[:, None]
    is_group = groups * GROUP < num_columns
    tl.store(at, largest * (1.0 / LARGEST), is_row[:, None] & is_group[None, :])
    y = tl.reshape(grouped * tl.div_rn(LARGEST, largest)[:, :, None], (ROWS, BLOCK))
    mask = is_row[:, None] & (columns < num_columns)[None, :]
    tl.store(y_MN + rows[:, None] * num_columns + columns[None, :], y.to(tl.float8e4nv), mask)


def empty_quantized(
    num_rows: int, num_columns: int, group: str, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Return places for values and scales; the scales of "1x128" lie column by column."""
    values = torch.empty(num_rows, num_columns, dtype=FP8, device=like.device)
    groups = 1 if group == "row" else -(-num_columns // SIDE)
    scales = torch.empty(groups, num_rows, dtype=torch.float32, device=like.device)
    return values, scales.t()


def rows_of_program(num_columns: int, group: str) -> tuple[tuple[int, float, float, int, int], int]:
    """Return the constants of a kernel that ends with `store_quantized`, and its warps."""
    block = next_power_of_two(num_columns)
    if group != "row":
        block = max(block, SIDE)
    rows_each = max(1, ELEMENTS_PER_PROGRAM // block)
    num_warps = min(MOST_WARPS, max(1, rows_each * block // ELEMENTS_PER_WARP))
    return (block if group == "row" else SIDE, LARGEST, LEAST, rows_each, block), num_warps


def quantize_rows(
    launch: Launcher, inputs: tuple[Tensor, ...], group: str, *numbers: float
) -> tuple[Tensor, Tensor]:
    """Return values and scales that a kernel stores which ends with `store_quantized`.

    Args:
        launch: Of that kernel. It takes inputs, values, scales, the strides of the matrices among
            the inputs, rows, columns, numbers, and the constants of `rows_of_program`.
        inputs: Matrices (M, N), the first of which tells the shape, and vectors.
        group: "row" or "1x128".
        numbers: What else the kernel takes.
    """
    num_rows, num_columns = inputs[0].shape
    results = empty_quantized(num_rows, num_columns, group, inputs[0])
    tensors, call = (*inputs, *results), (kind_of(*inputs), group, numbers)
    if launch.again(call, tensors) or not inputs[0].numel():
        return results
    inputs = tuple(one if one.stride(-1) == 1 else one.contiguous() for one in inputs)
    strides = [one.stride(0) for one in inputs if one.dim() == 2]
    options, num_warps = rows_of_program(num_columns, group)
    key = (
        *(inputs[0].device, *(one.dtype for one in inputs), num_columns, group),
        tuple((stride % 16 == 0, stride == 1) for stride in strides),
        alignments((*inputs, *results)),
    )
    arguments = (*inputs, *results, *strides, num_rows, num_columns, *numbers, *options)
    programs, warps = -(-num_rows // options[3]), {"num_warps": num_warps}
    launch(key, programs, arguments, warps, call=call, tensors=tensors)
    return results
