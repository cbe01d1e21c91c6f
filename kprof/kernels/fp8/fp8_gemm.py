"""GEMM with FP8 weights: y = activation(x w' + bias), x (M, K) in FP8 or 16 bits, w (N, K).

`fp8_gemm` is the public function; the kernels are in `_gemm`. For few rows of x the time is that of
reading the weights: they are converted in registers to the 16 bits of x, and nothing has to be
quantised first. For many rows, both operands are FP8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from kprof.kernels import OURS, Kernel, Provider, Work
from kprof.kernels.fp8._gemm import gemm_operator
from kprof.kernels.fp8.quantize_fp8 import FP8, SCALES_PER_16_BYTES, SIDE
from kprof.kernels.fp8.quantize_fp8 import KERNEL as QUANTIZE

Activation = Literal["none", "relu", "silu", "gelu"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "relu": functional.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
}
WIDE = (torch.float16, torch.bfloat16)


def fp8_gemm(
    x: Tensor,
    w: Tensor,
    x_scale: Tensor | None,
    w_scale: Tensor,
    bias: Tensor | None = None,
    activation: Activation = "none",
) -> Tensor:
    """Return activation(x w' + bias), summed in float32; in bfloat16, or x's dtype of 16 bits.

    Args:
        x: (M, K); float8_e4m3fn, or float16 or bfloat16 without scales.
        w: (N, K); float8_e4m3fn.
        x_scale: Scales of x, as `quantize_fp8` returns them: (M, 1); or (M, K / 128) where
            `w_scale` is of squares.
        w_scale: Likewise (N, 1), or (N / 128, K / 128).
        bias: (N,).
        activation: "none", "relu", "silu" or "gelu" (the exact one).
    """
    y: Tensor = gemm_operator(x, w, x_scale, w_scale, bias, activation)
    return y


def _reference(
    x: Tensor,
    w: Tensor,
    x_scale: Tensor | None,
    w_scale: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """Multiply by the scales first, then in their dtype."""
    dtype = w_scale.dtype
    wide_x = x.to(dtype) if x_scale is None else _scaled(x, x_scale)
    y = _ended(wide_x @ _scaled(w, w_scale).t(), bias, activation)
    return y.to(torch.bfloat16 if x.dtype == FP8 else x.dtype)


def _scaled(values: Tensor, scales: Tensor) -> Tensor:
    """Return values times scales, in the dtype of the scales."""
    if scales.shape[1] != 1 or scales.shape[0] != values.shape[0]:
        scales = scales.repeat_interleave(SIDE, 1)[:, : values.shape[1]]
    if scales.shape[0] != values.shape[0]:
        scales = scales.repeat_interleave(SIDE, 0)[: values.shape[0]]
    return values.to(scales.dtype) * scales


def _scaled_mm() -> Any:
    def multiply(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor) -> Tensor:
        options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        y: Tensor = torch._scaled_mm(x, w.t(), x_scale, w_scale.t(), **options)
        return y

    return _finished(multiply, is_blocked=False)


def _deep_gemm() -> Any:
    from deep_gemm import fp8_gemm_nt

    def multiply(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor) -> Tensor:
        y = torch.empty(x.shape[0], w.shape[0], dtype=torch.bfloat16, device=x.device)
        fp8_gemm_nt((x, x_scale), (w, w_scale), y)
        return y

    return _finished(multiply, is_blocked=True)


def _finished(multiply: Callable[..., Tensor], *, is_blocked: bool) -> Callable[..., Tensor]:
    """Return a peer's GEMM with bias and activation behind it; it takes one kind of scales."""

    def call(x: Tensor, w: Tensor, x_scale: Tensor | None, w_scale: Tensor, *ending: Any) -> Tensor:
        if x_scale is None or is_blocked != (tuple(w_scale.shape) != (w.shape[0], 1)):
            raise NotImplementedError("scales of this kind")
        return _ended(multiply(x, w, x_scale, w_scale), *ending)

    return call


def _ended(y: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    return ACTIVATIONS[activation](y if bias is None else y + bias.to(y.dtype))


def _refuses(
    x: Tensor,
    w: Tensor,
    x_scale: Tensor | None,
    w_scale: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
) -> str | None:
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1]:
        return f"{tuple(x.shape)} by {tuple(w.shape)}, which are not (M, K) and (N, K)"
    if w.dtype != FP8 or x.dtype not in (FP8, *WIDE) or (x.dtype == FP8) != (x_scale is not None):
        return f"x in {x.dtype}, weights in {w.dtype}: not float8_e4m3fn with scales"
    (num_rows, depth), num_columns = x.shape, w.shape[0]
    groups = -(-depth // SIDE)
    of_rows, of_blocks = (num_columns, 1), (-(-num_columns // SIDE), groups)
    is_blocked = tuple(w_scale.shape) == of_blocks and of_blocks != of_rows
    if not is_blocked and tuple(w_scale.shape) != of_rows:
        return f"{tuple(w_scale.shape)} scales of weights: neither of rows nor of squares"
    if x_scale is not None and tuple(x_scale.shape) != (num_rows, groups if is_blocked else 1):
        return f"{tuple(x_scale.shape)} scales of x, which do not go with those of the weights"
    if activation not in ACTIVATIONS:
        return f"{activation}: none of {', '.join(ACTIVATIONS)}"
    return None


def _work(x: Tensor, w: Tensor, x_scale: Tensor | None, w_scale: Tensor, *others: object) -> Work:
    """Count both matrices read once, their scales, and the result."""
    read = x.numel() * x.element_size() + w.numel() + 4 * w_scale.numel()
    read += 0 if x_scale is None else 4 * x_scale.numel()
    return Work(2 * x.numel() * w.shape[0], read + 2 * x.shape[0] * w.shape[0])


def _inputs(shape: tuple[int, ...], draw: Any) -> tuple[Any, ...]:
    """Make a call of (M, N, K), by rows; with a fourth number of 1 in blocks, of 2 with x as is."""
    num_rows, num_columns, depth, *kind = shape
    is_blocked = kind == [1]
    x, w = draw(num_rows, depth), draw.plain(num_columns, depth, scale=depth**-0.5)
    quantize = QUANTIZE.reference
    w, w_scale = quantize(w, "128x128" if is_blocked else "row")
    if kind == [2]:
        return x, w, None, w_scale
    x, x_scale = quantize(x, "1x128" if is_blocked else "row")
    return x, w, _column_major(x_scale), w_scale


def _column_major(scales: Tensor) -> Tensor:
    """Return column-major scales, as `quantize_fp8` does: otherwise each call would copy them."""
    num_rows, num_groups = scales.shape
    if num_groups == 1:
        return scales
    room = scales.new_empty(num_groups, -(-num_rows // SCALES_PER_16_BYTES) * SCALES_PER_16_BYTES)
    return room.t()[:num_rows].copy_(scales)


LLAMA = ((6_144, 4_096), (4_096, 4_096), (28_672, 4_096), (4_096, 14_336))

KERNEL = Kernel(
    name="fp8_gemm",
    replaces="torch's scaled product of matrices in float8_e4m3fn",
    reference=_reference,
    truth=_reference,
    providers=(
        Provider(OURS, lambda: fp8_gemm, "kprof", is_varying=True),
        Provider("eager", lambda: _reference, is_varying=True),
        Provider("scaled-mm", _scaled_mm, is_varying=True),
        Provider("deep-gemm", _deep_gemm, "sgl-deep-gemm", is_varying=True),
    ),
    refuses=_refuses,
    inputs=_inputs,
    work=_work,
    shapes=tuple((m, *shape) for shape in LLAMA for m in (1, 8, 64, 512, 4_096)),
    edges=((5, 48, 80), (70, 272, 384, 1), (3, 33, 144, 2), (130, 64, 256)),
    reach=(2**17,),
    dtypes=("bfloat16",),
    exact=2,
    rows=(0, 2),
    needs_gpu="Triton's interpreter truncates to bfloat16",
    sources=(
        "Micikevicius and others, FP8 formats for deep learning, arXiv 2209.05433",
        "DeepSeek-AI, DeepSeek-V3 technical report, arXiv 2412.19437: squares of 128, and sums "
        "that leave the tensor cores every 128 elements",
    ),
)
