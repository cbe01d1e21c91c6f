"""The end of kernels that quantise rows to FP8: scales, and where values and scales are stored."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kprof.kernels._launch import next_power_of_two

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


def rows_of_program(num_columns: int) -> tuple[int, int, int]:
    """Return the rows and the columns of a program that ends with `store_rows`, and its warps."""
    block = next_power_of_two(num_columns)
    rows_each = max(1, ELEMENTS_PER_PROGRAM // block)
    num_warps = min(MOST_WARPS, max(1, rows_each * block // ELEMENTS_PER_WARP))
    return rows_each, block, num_warps
