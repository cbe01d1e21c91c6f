"""GroupNorm and the SiLU after it, as in the residual blocks of U-Nets.

    g = (x - mean) / sqrt(var + eps) * weight + bias      mean and var of each group of channels
    y = g * sigmoid(g)                                    of g rounded to x's dtype

x and y are (N, C, ...), weight and bias (C,). A CTA has one group of one sample, which lies in one
piece of memory. A small group stays in registers; of a larger one, the passes after the first one
read from caches. Statistics are float32, and the mean is subtracted before squares are added up.

It has no gradients. Entered by `group_norm_silu`. In names of tensors N is
samples, C channels, S places of a channel.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from kprof.kernels import OURS, Kernel, Provider, Work
from kprof.kernels.runtime import (
    DTYPES,
    Launcher,
    alignments,
    define,
    kind_of,
    needs_gradient,
    next_power_of_two,
    refuse_gradients,
)
from kprof.kernels.tiles.exact import divide, exp

# Elements of a group that a CTA holds in registers, and elements of a warp.
MOST_ELEMENTS, ELEMENTS_PER_WARP, MOST_WARPS = 8_192, 512, 16


def group_norm_silu(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float = 1e-5
) -> Tensor:
    """Return silu(group_norm(x)), without gradients.

    Args:
        x: (N, C, ...), contiguous; float32, float16 or bfloat16.
        groups: Of channels, a divisor of C.
        weight: (C,), of the same dtype.
        bias: (C,), of the same dtype.
        eps: Added to the variance.
    """
    refuse_gradients("group_norm_silu", x, weight, bias)
    return _operator(x, weight, bias, groups, float(eps))


def _reference(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Compute what a residual block of diffusers does."""
    return functional.silu(functional.group_norm(x, groups, weight, bias, eps))


def _run(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    y = torch.empty_like(x)
    call, tensors = (kind_of(x, weight, bias), groups, eps), (x, weight, bias, y)
    if _launch.again(call, tensors) or not x.numel():
        return y
    samples, channels = x.shape[:2]
    spatial = x.numel() // (samples * channels)
    elements = channels // groups * spatial
    block = min(MOST_ELEMENTS, next_power_of_two(elements))
    constants = (channels // groups, spatial, groups, block)
    key = (x.device, x.dtype, constants, alignments((x, weight, bias, y)))
    options = {"num_warps": min(MOST_WARPS, max(1, block // ELEMENTS_PER_WARP))}
    arguments = (*tensors, eps, *constants)
    _launch(key, samples * groups, arguments, options, call=call, tensors=tensors)
    return y


@triton.jit
def group_norm_kernel(
    x_NCS,
    weight_C,
    bias_C,
    y_NCS,
    eps,
    CHANNELS: tl.constexpr,
    SPATIAL: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise one group of one sample. CHANNELS are those of a group."""
    SIZE: tl.constexpr = CHANNELS * SPATIAL
    first = tl.program_id(0).to(tl.int64) * SIZE
    channel = (tl.program_id(0) % GROUPS) * CHANNELS
    places = tl.arange(0, BLOCK)
    if BLOCK >= SIZE:
        mask = places < SIZE
        x = tl.load(x_NCS + first + places, mask, other=0.0).to(tl.float32)
        mean = tl.sum(x, 0) * (1.0 / SIZE)
        x = tl.where(mask, x - mean, 0.0)
        # The rounding error of a large mean matters.
        rest = tl.sum(x, 0) * (1.0 / SIZE)
        x = tl.where(mask, x - rest, 0.0)
        rstd = tl.rsqrt(tl.sum(x * x, 0) * (1.0 / SIZE) + eps)
        _store(x * rstd, weight_C, bias_C, y_NCS, first, channel, places, SIZE, SPATIAL)
    else:
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, SIZE, BLOCK):
            mask = start + places < SIZE
            total += tl.load(x_NCS + first + start + places, mask, other=0.0).to(tl.float32)
        mean = tl.sum(total, 0) * (1.0 / SIZE)
        apart = tl.zeros((BLOCK,), tl.float32)
        squares = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, SIZE, BLOCK):
            mask = start + places < SIZE
            x = tl.load(x_NCS + first + start + places, mask, other=0.0).to(tl.float32)
            x = tl.where(mask, x - mean, 0.0)
            apart += x
            squares += x * x
        rest = tl.sum(apart, 0) * (1.0 / SIZE)
        rstd = tl.rsqrt(tl.sum(squares, 0) * (1.0 / SIZE) - rest * rest + eps)
        for start in range(0, SIZE, BLOCK):
            mask = start + places < SIZE
            x = tl.load(x_NCS + first + start + places, mask, other=0.0).to(tl.float32)
            x = (x - mean - rest) * rstd
            here = start + places
            _store(x, weight_C, bias_C, y_NCS, first, channel, here, SIZE, SPATIAL)


@triton.jit
def _store(
    normed,
    weight_C,
    bias_C,
    y_NCS,
    first,
    channel,
    places,
    SIZE: tl.constexpr,
    SPATIAL: tl.constexpr,
):
    """Scale, shift and activate a block, and write it."""
    mask = places < SIZE
    of = channel + places // SPATIAL
    weight = tl.load(weight_C + of, mask, other=0.0)
    bias = tl.load(bias_C + of, mask, other=0.0).to(tl.float32)
    y = normed * weight.to(tl.float32) + bias
    # Rounded before the activation, as torch rounds it.
    y = y.to(weight.dtype).to(tl.float32)
    y = divide(y, 1.0 + exp(-y, weight.dtype == tl.float32), weight.dtype == tl.float32)
    tl.store(y_NCS + first + places, y.to(weight.dtype), mask)


_launch = Launcher(group_norm_kernel)
_operator = define(
    "group_norm_silu(Tensor x, Tensor weight, Tensor bias, int groups, float eps) -> Tensor",
    _run,
    lambda x, *others: torch.empty_like(x, memory_format=torch.contiguous_format),
)


def _refuses(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> str | None:
    if x.dtype not in DTYPES:
        return f"{x.dtype} is none of float32, float16 and bfloat16"
    if weight.dtype != x.dtype or bias.dtype != x.dtype:
        return f"weights in {weight.dtype}, an input in {x.dtype}"
    if x.dim() < 3 or groups < 1 or x.shape[1] % groups or weight.shape != x.shape[1:2]:
        return f"{groups} groups of {tuple(x.shape)}"
    if not x.is_contiguous():
        return "its samples or channels are not contiguous"
    return "it has no gradients" if needs_gradient(x, weight, bias) else None


def _inputs(shape: tuple[int, ...], draw: Any) -> tuple[Any, ...]:
    samples, channels, spatial, groups = shape
    return (
        draw(samples, channels, spatial),
        groups,
        draw.plain(channels, scale=0.1, shift=1.0),
        draw.plain(channels, scale=0.1),
    )


def _work(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Work:
    num_bytes = (2 * x.numel() + 2 * weight.numel()) * x.element_size()
    return Work(12 * x.numel(), num_bytes)


KERNEL = Kernel(
    name="group_norm_silu",
    replaces="GroupNorm and the SiLU after it in the residual blocks of diffusers",
    reference=_reference,
    truth=_reference,
    providers=(
        Provider(OURS, lambda: group_norm_silu, "kprof"),
        Provider("eager", lambda: _reference),
        Provider("inductor", lambda: torch.compile(_reference, dynamic=False)),
    ),
    refuses=_refuses,
    inputs=_inputs,
    work=_work,
    shapes=(
        *((8, 320, 4_096, 32), (8, 960, 4_096, 32), (8, 640, 1_024, 32), (8, 1_920, 1_024, 32)),
        *((8, 1_280, 256, 32), (8, 2_560, 64, 32)),
    ),
    edges=((2, 6, 127, 3), (3, 4, 4_097, 2), (1, 32, 2, 32)),
    reach=(1_024,),
    rows=(0,),
    exact=3,
    sources=("Wu and He, Group Normalization, arXiv 1803.08494",),
)
