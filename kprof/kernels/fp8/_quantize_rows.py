"""Quantisation of rows, or of the columns of a transposed matrix, to FP8 with scales.

GEMMs of backward passes sum over the dimension that the forward pass left contiguous, so their
operands are transposed: two reads and one write. The largest of every column comes first, then
tiles are scaled, transposed and stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kprof.kernels.runtime import Launcher, alignments, kind_of, next_power_of_two

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
def amax(x32, axis: tl.constexpr) -> tl.tensor:
    """Return the largest magnitude, NaN where there is one, as torch does."""
    magnitude = tl.abs(x32)
    largest = tl.max(magnitude, axis=axis)
    has_nan = tl.max((magnitude != magnitude).to(tl.int32), axis=axis) > 0
    return tl.where(has_nan, float("nan"), largest)


@triton.jit
def store_quantized_rows(
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
    largest = amax(x32, 1)
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


# Of the matrix, to a program that looks for the largest; every later one reads what they found.
MOST_STRIPS, LEAST_ROWS = 16, 128
STRIP_TILE, STRIP_COLUMNS = 32, 128
TILE_ROWS, TILE_COLUMNS = 128, 64


@triton.jit(do_not_specialize=["num_rows", "rows_each"])
def quantize_fp8_column_amax_kernel(
    x_MN,
    largest_SN,
    x_step: tl.int64,
    num_rows,
    num_columns,
    rows_each,
    M: tl.constexpr,
    N: tl.constexpr,
) -> None:
    """Store the largest magnitude of N columns in each strip of rows."""
    bands = tl.cdiv(num_columns, N)
    band, strip = tl.program_id(0) % bands, tl.program_id(0) // bands
    n_N = band * N + tl.arange(0, N)
    is_n_N = n_N < num_columns
    end = tl.minimum((strip + 1) * rows_each, num_rows)
    largest_N = tl.zeros([N], tl.float32)
    for start in tl.range(strip * rows_each, end, M, num_stages=3):
        m_M = start + tl.arange(0, M)
        at_MN = m_M[:, None].to(tl.int64) * x_step + n_N[None, :]
        x = tl.load(x_MN + at_MN, (m_M < end)[:, None] & is_n_N[None, :], other=0.0)
        of_tile_N = amax(x.to(tl.float32), 0)
        # A NaN stays: it is larger than nothing, and nothing is larger than it.
        largest_N = tl.where(of_tile_N <= largest_N, largest_N, of_tile_N + 0.0 * largest_N)
    tl.store(largest_SN + strip * num_columns + n_N, largest_N, is_n_N)


@triton.jit(do_not_specialize=["num_strips"])
def quantize_fp8_transposed_kernel(
    x_MN,
    y_NM,
    scale_N,
    largest_SN,
    x_step: tl.int64,
    num_rows,
    num_columns,
    num_strips,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    STRIPS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
) -> None:
    """Scale, transpose and store one tile."""
    bands = tl.cdiv(num_columns, N)
    band, strip = tl.program_id(0) % bands, tl.program_id(0) // bands
    m_M, n_N = strip * M + tl.arange(0, M), band * N + tl.arange(0, N)
    is_m_M, is_n_N = m_M < num_rows, n_N < num_columns
    at_MN = m_M[:, None].to(tl.int64) * x_step + n_N[None, :]
    x = tl.load(x_MN + at_MN, is_m_M[:, None] & is_n_N[None, :], other=0.0)
    s_S = tl.arange(0, STRIPS)
    is_SN = (s_S < num_strips)[:, None] & is_n_N[None, :]
    found = tl.load(largest_SN + s_S[:, None] * num_columns + n_N[None, :], is_SN, other=0.0)
    largest_N = amax(found, 0)
    largest_N = tl.where(largest_N < LEAST, LEAST, largest_N)
    y = (x.to(tl.float32) * tl.div_rn(LARGEST, largest_N)[None, :]).to(tl.float8e4nv)
    at_NM = n_N[:, None].to(tl.int64) * num_rows + m_M[None, :]
    tl.store(y_NM + at_NM, y.T, is_n_N[:, None] & is_m_M[None, :])
    if strip == 0:
        tl.store(scale_N + n_N, largest_N * (1.0 / LARGEST), is_n_N)


_launch_column_amax, _launch_transposed = (
    Launcher(quantize_fp8_column_amax_kernel),
    Launcher(quantize_fp8_transposed_kernel),
)


def quantize_transposed(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x of (M, N) as (N, M) in float8_e4m3fn, and (N, 1) scales to multiply that by."""
    num_rows, num_columns = x.shape
    values = torch.empty(num_columns, num_rows, dtype=FP8, device=x.device)
    scales = torch.empty(num_columns, 1, dtype=torch.float32, device=x.device)
    if not x.numel():
        return values, scales.zero_()
    x = x if x.stride(1) == 1 else x.contiguous()
    rows_each = max(LEAST_ROWS, next_power_of_two(num_rows) // MOST_STRIPS)
    strips = -(-num_rows // rows_each)
    largest = torch.empty(strips, num_columns, dtype=torch.float32, device=x.device)
    sizes = x.stride(0), num_rows, num_columns
    tensors = (x, values, scales, largest)
    key = x.device, x.dtype, alignments(tensors, *sizes)
    call = kind_of(*tensors)
    if not _launch_column_amax.again(call, (x, largest)):
        cut = (rows_each, STRIP_TILE, STRIP_COLUMNS)
        grid = strips * -(-num_columns // STRIP_COLUMNS)
        options = {"num_warps": 4}
        given = (x, largest, *sizes, *cut)
        _launch_column_amax(key, grid, given, options, call=call, tensors=(x, largest))
    if not _launch_transposed.again(call, tensors):
        constants = (LARGEST, LEAST, MOST_STRIPS, TILE_ROWS, TILE_COLUMNS)
        grid = -(-num_rows // TILE_ROWS) * -(-num_columns // TILE_COLUMNS)
        arguments = (*tensors, *sizes, strips, *constants)
        _launch_transposed(key, grid, arguments, {"num_warps": 4}, call=call, tensors=tensors)
    return values, scales
