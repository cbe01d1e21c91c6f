"""SwiGLU whose result goes to an FP8 matrix product: gated, rounded and quantised in one pass."""

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
from kprof.kernels.swiglu import KERNEL as SWIGLU

Group = Literal["row", "1x128"]


@triton.jit(do_not_specialize=["num_rows"])
def _kernel(
    gate_MN,
    up_MN,
    y_MN,
    scale_GM,
    gate_stride: tl.int64,
    up_stride: tl.int64,
    num_rows,
    num_columns,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    gate = tl.load(gate_MN + rows[:, None] * gate_stride + columns[None, :], mask, other=0.0)
    up = tl.load(up_MN + rows[:, None] * up_stride + columns[None, :], mask, other=0.0)
    gate32 = gate.to(tl.float32)
    # Rounded where Hugging Face rounds: before the product, and after it.
    silu = (gate32 / (1.0 + tl.exp(-gate32))).to(gate.dtype).to(tl.float32)
    y32 = (silu * up.to(tl.float32)).to(gate.dtype).to(tl.float32)
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


def swiglu_quantize_fp8(gate: Tensor, up: Tensor, group: Group = "row") -> tuple[Tensor, Tensor]:
    """Return silu(gate) * up in float8_e4m3fn, and by what to multiply it; no gradient.

    Args:
        gate: (M, N); float32, float16 or bfloat16.
        up: (M, N), of the same dtype.
        group: As of `quantize_fp8`.
    """
    values, scales = _operator(gate, up, group)
    return values, scales


def _run(gate: Tensor, up: Tensor, group: str) -> tuple[Tensor, Tensor]:
    return quantize_rows(_launch, (gate, up), group)


_operator = define(
    "swiglu_quantize_fp8(Tensor gate, Tensor up, str group) -> (Tensor, Tensor)",
    _run,
    lambda gate, up, group: empty_quantized(gate.shape[0], gate.shape[1], group, gate),
)


def _reference(gate: Tensor, up: Tensor, group: Group = "row") -> tuple[Tensor, Tensor]:
    """Gate as Hugging Face does, then quantise."""
    values, scales = QUANTIZE.reference(torch.nn.functional.silu(gate) * up, group)
    return values, scales


def _truth(gate: Tensor, up: Tensor, group: Group = "row") -> tuple[Tensor, Tensor]:
    values, scales = QUANTIZE.truth(SWIGLU.truth(gate, up), group)
    return values, scales


def _refuses(gate: Tensor, up: Tensor, group: str = "row") -> str | None:
    if group not in ("row", "1x128"):
        return f"groups of {group}: rows do not see one another"
    if up.shape != gate.shape or up.dtype != gate.dtype:
        return f"{tuple(gate.shape)} in {gate.dtype} times {tuple(up.shape)} in {up.dtype}"
    if gate.dim() != 2 or gate.shape[1] > MOST_COLUMNS:
        return f"an input of shape {tuple(gate.shape)}: two dimensions, {MOST_COLUMNS:,} columns"
    return QUANTIZE.refuses(gate) or QUANTIZE.refuses(up)


def _work(gate: Tensor, up: Tensor, group: str = "row") -> Work:
    """Count two reads, a byte an element written, and the scales; 8 FLOPs an element."""
    num_scales = gate.shape[0] * (1 if group == "row" else -(-gate.shape[1] // 128))
    return Work(8 * gate.numel(), (2 * gate.element_size() + 1) * gate.numel() + 4 * num_scales)


KERNEL = Kernel(
    name="swiglu_quantize_fp8",
    replaces="silu(gate) * up of Hugging Face, and its quantisation to float8_e4m3fn",
    reference=_reference,
    truth=_truth,
    providers=(
        Provider(OURS, lambda: swiglu_quantize_fp8, "kprof"),
        Provider("eager", lambda: _reference),
        Provider("inductor", lambda: torch.compile(_reference, dynamic=False)),
    ),
    refuses=_refuses,
    inputs=lambda shape, draw: (draw(*shape), draw(*shape)),
    work=_work,
    shapes=((8_192, 14_336), (32_768, 8_192), (8_192, 4_096)),
    edges=((5, 127), (130, 384), (3, 4_097)),
    reach=(2**19,),
    needs_gpu="Triton's interpreter rounds to float8 wrongly",
    sources=("DeepSeek-AI, DeepSeek-V3 technical report, arXiv 2412.19437: blocks of 128",),
)
