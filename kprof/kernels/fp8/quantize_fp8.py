"""Quantisation to FP8 (e4m3) with scales: of rows, 128 elements of a row, squares of 128, columns.

values = x * 448 / amax and scale = amax / 448, with amax the largest magnitude of a group, so that
values * scale is x again. `quantize_fp8` is the public function: one read and one write, as amax is
found while the values are in registers. `quantize_transposed` is for backward passes, whose GEMMs
sum over rows: it takes two reads, one for the amax of each column. Other families quantise rows
with `store_quantized_rows` behind their own computation.

M rows of x, N columns.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from kprof.kernels import OURS, Kernel, Provider, Work
from kprof.kernels.runtime import Launcher, alignments, define, kind_of, next_power_of_two

Group = Literal["row", "1x128", "128x128"]
ROWS_PER_PROGRAM = 32
# Columns of scales begin at multiples of 16 bytes, as TMA requires.
SCALES_PER_16_BYTES = 4
FP8 = torch.float8_e4m3fn
LARGEST = 448.0
# Least amax: that of a group of zeros. Any other 16-bit number is larger.
LEAST = 1e-12
SIDE = 128
# Columns of the longest row that fits the registers of a CTA.
MOST_COLUMNS = 65_536
ELEMENTS_PER_PROGRAM = 4_096
ELEMENTS_PER_WARP = 512
MOST_WARPS = 32


@cache
def has_dependent_launch(device: torch.device) -> bool:
    """Tell whether the GPU has programmatic dependent launch: from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def allow_dependent_launch(OVERLAPS: tl.constexpr):
    """Let CTAs of the next launch start as soon as there is room for them."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def amax(x32, axis: tl.constexpr) -> tl.tensor:
    """Return the largest magnitude; NaN if there is one, as torch does."""
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
    """Return rows, columns and warps of a CTA that ends with `store_quantized_rows`."""
    block = next_power_of_two(num_columns)
    rows_each = max(1, ELEMENTS_PER_PROGRAM // block)
    num_warps = min(MOST_WARPS, max(1, rows_each * block // ELEMENTS_PER_WARP))
    return rows_each, block, num_warps


@triton.jit
def quantize_fp8_rows_kernel(
    x_MN,
    y_MN,
    scale_M,
    x_stride: tl.int64,
    num_rows,
    num_columns,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Quantise whole rows, a scale for each."""
    allow_dependent_launch(OVERLAPS)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    is_row = rows < num_rows
    mask = is_row[:, None] & (columns < num_columns)[None, :]
    x = tl.load(x_MN + rows[:, None] * x_stride + columns[None, :], mask, other=0.0)
    x32 = x.to(tl.float32)
    store_quantized_rows(x32, y_MN, scale_M, rows, num_rows, num_columns, LARGEST, LEAST, BLOCK)


@triton.jit
def quantize_fp8_blocks_kernel(
    x_MN,
    y_MN,
    scale_BM,
    x_stride: tl.int64,
    num_rows,
    num_columns,
    scale_step,
    IS_SQUARE: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Quantise blocks; their scales are column-major, as GEMMs read them."""
    num_blocks = tl.cdiv(num_columns, SIDE)
    block, strip = tl.program_id(0) % num_blocks, tl.program_id(0) // num_blocks
    rows = strip.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = block * SIDE + tl.arange(0, SIDE)
    is_row = rows < num_rows
    mask = is_row[:, None] & (columns < num_columns)[None, :]
    x = tl.load(x_MN + rows[:, None] * x_stride + columns[None, :], mask, other=0.0)
    x32 = x.to(tl.float32)
    largest = amax(x32, 1)
    if IS_SQUARE:
        has_nan = tl.max((largest != largest).to(tl.int32), axis=0) > 0
        largest = tl.where(has_nan, float("nan"), tl.max(largest, axis=0))
        largest = tl.where(largest < LEAST, LEAST, largest)
        tl.store(scale_BM + strip * num_blocks + block, largest * (1.0 / LARGEST))
        y = x32 * tl.div_rn(LARGEST, largest)
    else:
        largest = tl.where(largest < LEAST, LEAST, largest)
        at = scale_BM + block.to(tl.int64) * scale_step + rows
        tl.store(at, largest * (1.0 / LARGEST), is_row)
        y = x32 * tl.div_rn(LARGEST, largest)[:, None]
    tl.store(y_MN + rows[:, None] * num_columns + columns[None, :], y.to(tl.float8e4nv), mask)


# Strips of rows, at most and at least this long, whose column amax a CTA finds; then its tile of a
# strip, and the tiles of the transposing kernel.
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
        # NaN persists: no comparison with it is true.
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


_launch_rows = Launcher(quantize_fp8_rows_kernel)
_launch_blocks = Launcher(quantize_fp8_blocks_kernel)


def quantize_fp8(x: Tensor, group: Group = "row") -> tuple[Tensor, Tensor]:
    """Return x in float8_e4m3fn, and the scales to multiply it by.

    A group with an infinity or NaN in it becomes NaN where that is, and its scale tells.

    Args:
        x: (M, N); float32, float16 or bfloat16.
        group: What shares a scale. Scales are float32 of shape (M, 1); for "1x128" (M, N / 128),
            column-major, columns at multiples of 16 bytes; for "128x128" (M / 128, N / 128).
    """
    values, scales = _operator(x, group)
    return values, scales


def _run(x: Tensor, group: str) -> tuple[Tensor, Tensor]:
    values, scales = _empty(x, group)
    launch = _launch_rows if group == "row" else _launch_blocks
    known: dict[str, Any] = {"call": (kind_of(x), group), "tensors": (x, values, scales)}
    if launch.again(**known) or not x.numel():
        return values, scales
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, num_columns = x.shape
    stride = x.stride(0)
    key = (
        *(x.device, x.dtype, group, num_columns, num_rows % 16 == 0, num_rows == 1),
        *(stride % 16 == 0, stride == 1, alignments((x, values, scales), scales.stride(1))),
    )
    tensors = (x, values, scales, stride, num_rows, num_columns)
    if group == "row":
        rows_each, block, num_warps = rows_of_program(num_columns)
        grid, is_let_in = -(-num_rows // rows_each), has_dependent_launch(x.device)
        constants = (LARGEST, LEAST, rows_each, block, is_let_in)
        launch(key, grid, (*tensors, *constants), {"num_warps": num_warps}, **known)
        return values, scales
    is_square = group == "128x128"
    rows_each = SIDE if is_square else ROWS_PER_PROGRAM
    num_warps = 16 if is_square else 8
    grid = -(-num_rows // rows_each) * -(-num_columns // SIDE)
    squares = (is_square, LARGEST, LEAST, rows_each, SIDE)
    launch(key, grid, (*tensors, scales.stride(1), *squares), {"num_warps": num_warps}, **known)
    return values, scales


def _empty(x: Tensor, group: str) -> tuple[Tensor, Tensor]:
    num_rows, num_columns = x.shape
    values = torch.empty(num_rows, num_columns, dtype=FP8, device=x.device)
    blocks = 1 if group == "row" else -(-num_columns // SIDE)
    if group == "1x128":
        step = -(-num_rows // SCALES_PER_16_BYTES) * SCALES_PER_16_BYTES
        scales = torch.empty(blocks, step, dtype=torch.float32, device=x.device).t()[:num_rows]
    else:
        strips = -(-num_rows // SIDE) if group == "128x128" else num_rows
        scales = torch.empty(strips, blocks, dtype=torch.float32, device=x.device)
    return values, scales


_operator = define("quantize_fp8(Tensor x, str group) -> (Tensor, Tensor)", _run, _empty)


_launch_column_amax, _launch_transposed = (
    Launcher(quantize_fp8_column_amax_kernel),
    Launcher(quantize_fp8_transposed_kernel),
)


def quantize_transposed(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x of (M, N) transposed in float8_e4m3fn, and its (N, 1) scales."""
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


def dequantize_fp8(values: Tensor, scales: Tensor, group: Group = "row") -> Tensor:
    """Return the values times their scales, in float32."""
    if group != "row":
        scales = scales.repeat_interleave(SIDE, 1)[:, : values.shape[1]]
    if group == "128x128":
        scales = scales.repeat_interleave(SIDE, 0)[: values.shape[0]]
    return values.float() * scales


def _scaled(x: Tensor, group: Group = "row") -> tuple[Tensor, Tensor]:
    """Return x scaled to an amax of 448 in each group, and the scales to multiply it by."""
    num_rows, num_columns = x.shape
    if group == "row":
        largest = x.abs().amax(1, keepdim=True).clamp(min=LEAST)
        return x * (LARGEST / largest), largest * (1 / LARGEST)
    rows = SIDE if group == "128x128" else 1
    padding = (0, -num_columns % SIDE, 0, -num_rows % rows)
    padded = torch.nn.functional.pad(x, padding)
    blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // SIDE, SIDE)
    largest = blocks.abs().amax((1, 3), keepdim=True).clamp(min=LEAST)
    values = (blocks * (LARGEST / largest)).view(padded.shape)[:num_rows, :num_columns]
    return values, (largest * (1 / LARGEST)).squeeze(3).squeeze(1)


def _reference(x: Tensor, group: Group = "row") -> tuple[Tensor, Tensor]:
    """Quantise in eager torch, in float32."""
    values, scales = _scaled(x.float(), group)
    return values.to(FP8), scales


def _refuses(x: Tensor, group: str = "row") -> str | None:
    if type(x) not in (Tensor, torch.nn.Parameter):
        return f"a {type(x).__name__} is no plain tensor"
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"{x.dtype} is none of float32, float16 and bfloat16"
    if x.dim() != 2:
        return f"{x.dim()} dimensions, not 2"
    if group == "row" and x.shape[1] > MOST_COLUMNS:
        return f"rows of {x.shape[1]:,} columns: at most {MOST_COLUMNS:,} fit the registers"
    return None


def _work(x: Tensor, group: str = "row") -> Work:
    """Count x read, a byte an element written, and the scales; 3 FLOPs an element."""
    num_scales = _empty(torch.empty(x.shape, device="meta"), group)[1].numel()
    return Work(3 * x.numel(), (x.element_size() + 1) * x.numel() + 4 * num_scales)


KERNEL = Kernel(
    name="quantize_fp8",
    replaces="scaling a matrix by its largest elements, and casting it to float8_e4m3fn",
    reference=_reference,
    truth=_scaled,
    providers=(
        Provider(OURS, lambda: quantize_fp8, "kprof"),
        Provider("eager", lambda: _reference),
        Provider("inductor", lambda: torch.compile(_reference, dynamic=False)),
    ),
    refuses=_refuses,
    inputs=lambda shape, draw: (draw(*shape),),
    work=_work,
    shapes=((8_192, 4_096), (32_768, 4_096), (8_192, 14_336)),
    edges=((5, 127), (130, 384), (3, 4_097)),
    reach=(2**19,),
    needs_gpu="Triton's interpreter rounds to float8 wrongly",
    sources=(
        "Micikevicius and others, FP8 formats for deep learning, arXiv 2209.05433",
        "DeepSeek-AI, DeepSeek-V3 technical report, arXiv 2412.19437: blocks of 128",
    ),
)
