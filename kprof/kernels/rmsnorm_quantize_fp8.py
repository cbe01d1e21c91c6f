"""RMSNorm whose result goes to an FP8 matrix product: normed, rounded and quantised in one pass."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from kprof.kernels import OURS, Kernel, Provider, Work
from kprof.kernels._fp8 import MOST_COLUMNS, empty_quantized, quantize_rows, store_quantized
from kprof.kernels._launch import Launcher
from kprof.kernels._operator import define
from kprof.kernels.quantize_fp8 import KERNEL as QUANTIZE
from kprof.kernels.rmsnorm import KERNEL as RMSNORM

Group = Literal["row", "1x128"]


@triton.jit(do_not_specialize=["num_rows"])
def _kernel(
    x_MN,
    weight_N,
    y_MN,
    scale_GM,
    x_stride: tl.int64,
    num_rows,
    num_columns,
    eps,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    is_column = columns < num_columns
    mask = (rows < num_rows)[:, None] & is_column[None, :]
    x = tl.load(x_MN + rows[:, None] * x_stride + columns[None, :], mask, other=0.0)
    x32 = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x32 * x32, axis=1) / num_columns + eps)
    weight = tl.load(weight_N + columns, is_column, other=0.0).to(tl.float32)
    # Rounded where Hugging Face rounds: before the weight, and after it.
    normed = (x32 * rstd[:, None]).to(x.dtype).to(tl.float32)
    y32 = (normed * weight[None, :]).to(x.dtype).to(tl.float32)
    store_quantized(
        y32,
        y_MN,
        scale_GM,
        rows,
        num_rows,
        num_columns,
        GROUP,
        LARGEST,
        LEAST,
        ROWS,
        BLOCK,
    )


_launch = Launcher(_kernel)


def rmsnorm_quantize_fp8(
    x: Tensor, weight: Tensor, eps: float = 1e-6, group: Group = "row"
) -> tuple[Tensor, Tensor]:
    """Return RMSNorm of the rows in float8_e4m3fn, and by what to multiply it; no gradient.

    Args:
        x: (M, N); float32, float16 or bfloat16.
        weight: (N,), of the same dtype.
        eps: Added to the mean of squares.
        group: As of `quantize_fp8`.
    """
    values, scales = _operator(x, weight, float(eps), group)
    return values, scales


def _run(x: Tensor, weight: Tensor, eps: float, group: str) -> tuple[Tensor, Tensor]:
    return quantize_rows(_launch, (x, weight), group, eps)


_operator = define(
    "rmsnorm_quantize_fp8(Tensor x, Tensor weight, float eps, str group) -> (Tensor, Tensor)",
    _run,
    lambda x, weight, eps, group: empty_quantized(x.shape[0], x.shape[1], group, x),
)


def _reference(
    x: Tensor, weight: Tensor, eps: float = 1e-6, group: Group = "row"
) -> tuple[Tensor, Tensor]:
    """Norm as Hugging Face does, then quantise."""
    values, scales = QUANTIZE.reference(RMSNORM.reference(x, weight, eps), group)
    return values, scales


def _truth(
    x: Tensor, weight: Tensor, eps: float = 1e-6, group: Group = "row"
) -> tuple[Tensor, Tensor]:
    values, scales = QUANTIZE.truth(RMSNORM.truth(x, weight, eps), group)
    return values, scales


def _refuses(x: Tensor, weight: Tensor, eps: float = 1e-6, group: str = "row") -> str | None:
    if group not in ("row", "1x128"):
        return f"groups of {group}: rows do not see one another"
    if x.dim() != 2 or x.shape[1] > MOST_COLUMNS:
        return f"an input of shape {tuple(x.shape)}: two dimensions, {MOST_COLUMNS:,} columns"
    return RMSNORM.refuses(x, weight, eps)


def _work(x: Tensor, weight: Tensor, eps: float = 1e-6, group: str = "row") -> Work:
    """Count x read, a byte an element written, and the scales; 7 FLOPs an element."""
    num_scales = x.shape[0] * (1 if group == "row" else -(-x.shape[1] // 128))
    return Work(7 * x.numel(), (x.element_size() + 1) * x.numel() + 4 * num_scales)


KERNEL = Kernel(
    name="rmsnorm_quantize_fp8",
    replaces="an RMSNorm of Hugging Face, and the quantisation of its result to float8_e4m3fn",
    reference=_reference,
    truth=_truth,
    providers=(
        Provider(OURS, lambda: rmsnorm_quantize_fp8, "kprof"),
        Provider("eager", lambda: _reference),
        Provider("inductor", lambda: torch.compile(_reference, dynamic=False)),
    ),
    refuses=_refuses,
    inputs=lambda shape, draw: (draw(*shape), draw.plain(shape[-1], scale=0.1, shift=1.0)),
    work=_work,
    shapes=((8_192, 4_096), (32_768, 4_096), (8_192, 8_192)),
    edges=((5, 127), (130, 384), (3, 4_097)),
    reach=(2**19,),
    needs_gpu="Triton's interpreter rounds to float8 wrongly",
    sources=("DeepSeek-AI, DeepSeek-V3 technical report, arXiv 2412.19437: blocks of 128",),
)
