"""FP8 with scales: one for a row, for 128 elements of a row, or for a square of 128 by 128.

One read and one write; the largest element is found and used while the values are in registers.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from kprof.kernels import OURS, Kernel, Provider, Work
from kprof.kernels.fp8._gemm import allow_dependent_launch, has_dependent_launch
from kprof.kernels.fp8._quantize_rows import (
    FP8,
    LARGEST,
    LEAST,
    MOST_COLUMNS,
    SIDE,
    amax,
    rows_of_program,
    store_quantized_rows,
)
from kprof.kernels.runtime import Launcher, alignments, define, kind_of

Group = Literal["row", "1x128", "128x128"]
ROWS_PER_PROGRAM = 32
# Scales in 16 bytes: where columns of them begin elsewhere, TMA cannot read them.
SCALES_PER_16_BYTES = 4


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
    """Quantise blocks; their scales lie column by column, as matrix products want them."""
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


_launch_rows = Launcher(quantize_fp8_rows_kernel)
_launch_blocks = Launcher(quantize_fp8_blocks_kernel)


def quantize_fp8(x: Tensor, group: Group = "row") -> tuple[Tensor, Tensor]:
    """Return x in float8_e4m3fn, and by what to multiply it to get x back.

    A group with an infinity or NaN in it becomes NaN where that is, and its scale tells.

    Args:
        x: (M, N); float32, float16 or bfloat16.
        group: What shares a scale. Scales are float32 of shape (M, 1); for "1x128" (M, N / 128),
            each column of them side by side, at a multiple of 16 bytes; for "128x128"
            (M / 128, N / 128).
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


def dequantize_fp8(values: Tensor, scales: Tensor, group: Group = "row") -> Tensor:
    """Return the values times their scales, in float32."""
    if group != "row":
        scales = scales.repeat_interleave(SIDE, 1)[:, : values.shape[1]]
    if group == "128x128":
        scales = scales.repeat_interleave(SIDE, 0)[: values.shape[0]]
    return values.float() * scales


def _scaled(x: Tensor, group: Group = "row") -> tuple[Tensor, Tensor]:
    """Return x such that the largest of each group is 448, and by what to multiply that."""
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
    """Do it in eager torch, in float32."""
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
