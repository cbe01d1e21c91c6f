"""Norms of rows, RMSNorm or LayerNorm, with or without a residual add before them.

    s = residual + x                             rounded to x's dtype; without a residual, s = x
    RMSNorm:   y = s / sqrt(mean(s²) + eps) * weight
    LayerNorm: y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias

x, residual, s and y are (..., N), weight and bias (N,). The statistics are float32. The residual
may have a narrower dtype than x, as sums under autocast have; its gradient then has that, too. The
result may be rounded to a narrower dtype, where autocast would round it for all of its readers.

On the GPU a CTA holds whole rows in registers, between the statistics and the product: forward is
one read and one write. Backward is two reads and one write: as many CTAs as fill the GPU walk over
the rows and prefetch the next ones. Each adds up its part of the gradients of weight and bias, and
a last kernel adds the parts in a fixed order, so that results do not depend on timing.

Entered by `rmsnorm`, `layernorm`, `add_rmsnorm` and `add_layernorm`. In names of tensors M is rows,
N columns, P CTAs, K parameters (weight, then bias).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, is_grad_enabled

from kprof.kernels import OURS, Kernel, Provider, Shape, Work
from kprof.kernels.runtime import (
    ALIGNMENT,
    DTYPES,
    Launcher,
    alignments,
    applied,
    count_rows,
    define,
    empty,
    empty_like,
    is_widened,
    kind_of,
    next_power_of_two,
    num_sms,
    rows_of,
    tile_of,
)

if TYPE_CHECKING:
    from kprof.kernels.correctness.inputs import Draw

# The rounding of an RMSNorm: LLAMA (Hugging Face) rounds before the weight, TORCH (torch, OLMo)
# after it; GEMMA rounds after it and adds 1 to the weight. LAYER is a LayerNorm, rounded last.
LLAMA: tl.constexpr = tl.constexpr(0)
TORCH: tl.constexpr = tl.constexpr(1)
GEMMA: tl.constexpr = tl.constexpr(2)
LAYER: tl.constexpr = tl.constexpr(3)
FORMS = {"llama": LLAMA.value, "torch": TORCH.value, "gemma": GEMMA.value, "layer": LAYER.value}
LLAMA_FORM, LAYER_FORM = LLAMA.value, LAYER.value
# Longer rows, with the sums of their gradients, do not fit the registers of a CTA.
MOST_COLUMNS = {"llama": 16_384, "torch": 16_384, "gemma": 16_384, "layer": 8_192}
# Forward, elements per CTA. Rows of at most FEW_COLUMNS get at most FEW_WARPS, so that most sums
# stay within one warp; longer rows load the weight before the sum, for which many threads wait.
FORWARD_ELEMENTS, FEW_WARPS, FEW_COLUMNS = 2_048, 4, 4_096
# Backward, elements per CTA and per SM: two CTAs of 8 warps fill an SM. Prefetched rows hide the
# latency of loads, and there are few partial sums.
BACKWARD_ELEMENTS, BACKWARD_ELEMENTS_PER_SM = 4_096, 8_192
# Backward, rows of these blocks: a warp has whole rows, as a barrier between the warps of a row
# costs up to half of the time. Elements and warps per CTA, bytes per SM of rows that are read at
# once, and most CTAs per SM.
ONE_WARP_BLOCKS, ONE_WARP_ELEMENTS, ONE_WARP_WARPS = (512, 1_024), 2_048, 2
ONE_WARP_BYTES, ONE_WARP_CTAS = 48 * 1024, 4
# Shared memory of an SM for prefetched rows, in bytes.
PREFETCH_BYTES = 192 * 1024
# The sum of partial gradients: CTAs added at once, columns per CTA, warps.
TILE, BLOCK_OF_SUM, WARPS_OF_SUM = 256, 16, 8
# Backward with a residual, for rows of just this length: registers per thread that leave room on an
# SM for a CTA of the sum. Other lengths would spill.
FITTED_COLUMNS, FITTED_REGISTERS = 2_048, 112

Form = Literal["llama", "torch", "gemma"]


def rmsnorm(
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    form: Form = "llama",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) * weight over the last dimension.

    Args:
        x: (..., N); float32, float16 or bfloat16.
        weight: (N,), of the same dtype or float32; None: ones.
        eps: Added to the mean of squares.
        form: "llama" rounds to x's dtype before the weight, and multiplies in the wider dtype of
            the two; "torch" rounds once, at the end, as torch and OLMo do; "gemma" does so, too,
            and adds 1 to the weight.
        dtype: Of the result, rounded from the dtype that `form` gives; None: that dtype.
    """
    return norm(form, x, None, weight, None, eps, dtype)[0]


def layernorm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension.

    It rounds once, at the end, as torch.nn.LayerNorm does. Mean and variance are two passes over a
    row in registers, without cancellation.

    Args:
        x: (..., N); float32, float16 or bfloat16.
        weight: (N,), of the same dtype; None: ones.
        bias: (N,), of the same dtype; None: zeros.
        eps: Added to the variance.
        dtype: Of the result; None: x's.
    """
    return norm("layer", x, None, weight, bias, eps, dtype)[0]


def add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    form: Form = "llama",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """Return the RMSNorm of residual + x, and that sum, rounded as the reference rounds it.

    Args:
        x: (..., N), the output of a block; float32, float16 or bfloat16.
        residual: As x, or of a narrower dtype.
        weight: (N,), of the same dtype or float32; None: ones.
        eps: Added to the mean of squares.
        form: As of `rmsnorm`.
        dtype: Of the norm, as of `rmsnorm`; the sum has x's.
    """
    return norm(form, x, residual, weight, None, eps, dtype)


def add_layernorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """Return the LayerNorm of residual + x, and that sum, rounded as the reference rounds it.

    Args:
        x: (..., N), the output of a block; float32, float16 or bfloat16.
        residual: As x, or of a narrower dtype.
        weight: (N,), of the same dtype; None: ones.
        bias: (N,), of the same dtype; None: zeros.
        eps: Added to the variance.
        dtype: Of the norm; None: x's. The sum has x's.
    """
    return norm("layer", x, residual, weight, bias, eps, dtype)


def _rmsnorm_reference(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, form: str = "llama"
) -> Tensor:
    """Compute the norms of Hugging Face's Llama, OLMo and Gemma as they do."""
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    if form == "llama":
        return normed.to(x.dtype) if weight is None else weight * normed.to(x.dtype)
    if weight is not None:
        normed = normed * (weight.float() + 1.0 if form == "gemma" else weight)
    return normed.to(x.dtype)


def _rmsnorm_truth(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _layernorm_reference(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _layernorm_truth(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps) * weight + bias


def _after_add(compute: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function of x, residual and options: `compute` of their sum, and the sum."""

    def run(x: Tensor, residual: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        added = residual + x
        return compute(added, *options), added

    return run


def _add_rmsnorm_truth(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    return _after_add(_rmsnorm_truth)(x, residual, weight, eps)


def _add_layernorm_truth(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    return _after_add(_layernorm_truth)(x, residual, weight, bias, eps)


class BackwardPlan(NamedTuple):
    """How rows are distributed. It depends on the columns alone, so that rows change no bits."""

    rows: int
    """Of a CTA, at a time."""
    block: int
    """Columns of a tile: the next power of two."""
    warps: int
    stages: int
    """Stages of the prefetch pipeline."""
    ctas_per_sm: int
    """Persistent ones."""


@functools.cache
def plan_forward(columns: int) -> tuple[int, int, int]:
    """Return rows per CTA, columns of its tile, and its warps."""
    rows, block, warps = tile_of(columns, FORWARD_ELEMENTS)
    return rows, block, warps if block > FEW_COLUMNS else min(warps, FEW_WARPS)


@functools.cache
def plan_backward(columns: int, row_bytes: int) -> BackwardPlan:
    """Return the plan for rows of which so many bytes are read, padding included."""
    rows, block, warps = tile_of(columns, BACKWARD_ELEMENTS)
    ctas = max(1, BACKWARD_ELEMENTS_PER_SM // (rows * block))
    if block in ONE_WARP_BLOCKS:
        rows, warps = ONE_WARP_ELEMENTS // block, ONE_WARP_WARPS
        ctas = min(ONE_WARP_CTAS, ONE_WARP_BYTES // (rows * row_bytes))
    prefetch_bytes = ctas * rows * row_bytes
    # 3 stages keep three rows of each CTA in shared memory, 2 stages up to one and a half.
    stages = 1
    if 3 * prefetch_bytes <= PREFETCH_BYTES:
        stages = 3
    elif 3 * prefetch_bytes < 2 * PREFETCH_BYTES:
        stages = 2
    return BackwardPlan(rows, block, warps, stages, ctas)


def norm(
    form: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """Return the normalised rows of x, or of residual + x, and then that sum, too.

    Args:
        form: Of `FORMS`.
        x: (..., N); float32, float16 or bfloat16.
        residual: As x, or of a narrower dtype.
        weight: (N,), of the same dtype or, with "llama", float32.
        bias: (N,), of the weight's dtype.
        eps: Added to the mean of squares.
        dtype: Of the normalised rows; None: x's or, with "llama", the wider one of x's and the
            weight's.
    """
    if is_grad_enabled():
        for one in (x, residual, weight, bias):
            if one is not None and one.requires_grad:
                given = x, residual, weight, bias, float(eps), FORMS[form], dtype, False
                return _with_gradient(*given)
    return tuple(_forward(x, residual, weight, bias, float(eps), FORMS[form], False, dtype))


def forked_norm(
    form: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """Return the normalised rows of x, and x for its further uses, with gradients.

    The kernel of the norm's backward adds the gradients of those uses; torch would add them in a
    pass of its own. The arguments are those of `norm`.
    """
    results: tuple[Tensor, ...] = _with_gradient(
        x, None, weight, bias, float(eps), FORMS[form], dtype, True
    )
    return results


class _WithGradient(torch.autograd.Function):
    """The operator with its gradients, outside of the dispatcher, which costs less host time."""

    @staticmethod
    def forward(
        ctx: Any,
        x,
        residual,
        weight,
        bias,
        eps: float,
        form: int,
        dtype: torch.dtype | None,
        forks: bool,
    ) -> tuple[Tensor, ...]:
        made = _forward(x, residual, weight, bias, eps, form, True, dtype)
        results, statistics = (made[:1], made[1:]) if residual is None else (made[:2], made[2:])
        # LayerNorm has two.
        mean = statistics[1] if form == LAYER_FORM else None
        ctx.save_for_backward(x if residual is None else results[1], weight, statistics[0], mean)
        ctx.set_materialize_grads(False)
        ctx.form, ctx.has_bias = form, bias is not None
        ctx.dtype_of_residual = None if residual is None else residual.dtype
        return (*results, x) if forks else tuple(results)

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor | None, dsum: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        if dy is None:
            # Only the sum has a gradient.
            return dsum, _as_residual(dsum, ctx.dtype_of_residual), *(None,) * 6
        x, weight, rstd, mean = ctx.saved_tensors
        _, _, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        num_parameters = (1 + ctx.has_bias) * (wants_weight or wants_bias)
        dx, *dparameters = _backward(dy, dsum, x, weight, rstd, mean, ctx.form, num_parameters)
        dweight = dparameters[0] if num_parameters and weight is not None else None
        dbias = dparameters[1] if num_parameters > 1 else None
        return dx, _as_residual(dx, ctx.dtype_of_residual), dweight, dbias, *(None,) * 4


def _as_residual(gradient: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """Return the gradient of a residual from that of the sum; without a residual, None."""
    return None if gradient is None or dtype is None else gradient.to(dtype)


def _empty_results(x, residual, weight, bias, eps, form, keeps, dtype=None) -> list[Tensor]:
    """Return y; with a residual, the sum; for gradients, rstd and the mean in two parts."""
    return _make_results(x, residual, weight, form, keeps, dtype, _empty)


def _make_results(x, residual, weight, form, keeps, dtype, make) -> list[Tensor]:
    if dtype is None and weight is not None and form == LLAMA_FORM and weight.dtype != x.dtype:
        dtype = torch.float32
    is_like_x = dtype is None or dtype == x.dtype
    results = [empty_like(x) if is_like_x else make(x.shape, dtype, x.device)]
    if residual is not None:
        results.append(empty_like(x))
    if keeps:
        rows = x.shape[:-1]
        results.append(make(rows, torch.float32, x.device))
        if form == LAYER_FORM:
            results.append(make((2, *rows), torch.float32, x.device))
    return results


def _empty(shape, dtype, device) -> Tensor:
    """Return a tensor of symbolic sizes, too."""
    return torch.empty(shape, dtype=dtype, device=device)


def _run_forward(x, residual, weight, bias, eps, form, keeps, dtype=None) -> tuple[Tensor, ...]:
    results = _make_results(x, residual, weight, form, keeps, dtype, empty)
    mean = rstd = None
    if keeps:
        rstd, mean = (results[-2], results[-1]) if form == LAYER_FORM else (results[-1], None)
    added = None if residual is None else results[1]
    tensors = (x, residual, weight, bias, results[0], added, mean, rstd)
    call = kind_of(x, residual, weight, bias), eps, form, keeps, dtype
    if not _launch_forward.again(call, tensors) and count_rows(x):
        _launch_first(call, tensors, eps, form)
    return tuple(results)


def _launch_first(call, tensors, eps, form) -> None:
    """Launch for the first call with such tensors."""
    x, residual, weight, bias, *results = tensors
    num_rows, columns = count_rows(x), x.shape[-1]
    rows, stride = rows_of(x)
    others, other_stride = (None, stride) if residual is None else rows_of(residual)
    weight, bias = _contiguous(weight), _contiguous(bias)
    rows_each, block, warps = plan_forward(columns)
    key = (
        *(x.device, x.dtype, results[0].dtype, columns, form, results[-1] is None, bias is None),
        None if residual is None else residual.dtype,
        None if weight is None else weight.dtype,
        alignments((rows, others, weight, bias), stride, other_stride),
    )
    arguments = (
        *(rows, others, weight, bias, *results, stride, other_stride, num_rows, eps),
        *(form, columns, rows_each, block, block > FEW_COLUMNS),
    )
    ctas, options = -(-num_rows // rows_each), {"num_warps": warps}
    _launch_forward(key, ctas, arguments, options, call=call, tensors=tensors)


def _empty_gradients(dy, dsum, x, weight, rstd, mean, form, num_parameters) -> list[Tensor]:
    """Return the gradients of x (and of the residual), and of the weight and the bias."""
    gradients = [empty_like(x)]
    for _ in range(num_parameters):
        # A bias may come without a weight.
        gradients.append(x.new_empty(x.shape[-1:]) if weight is None else empty_like(weight))
    return gradients


def _run_backward(dy, dsum, x, weight, rstd, mean, form, num_parameters) -> list[Tensor]:
    dx, *dparameters = _empty_gradients(dy, dsum, x, weight, rstd, mean, form, num_parameters)
    # Of statistics, which are contiguous float32, the alignment alone may differ.
    places = (rstd.data_ptr() | (0 if mean is None else mean.data_ptr())) % ALIGNMENT
    call = kind_of(dy, dsum, x, weight), places, form, num_parameters
    known = _launch_backward.find(call)
    if known is not None:
        partials = _empty_partials(x, num_parameters, known.grid[0])
        known.repeat((dy, dsum, x, weight, mean, rstd, dx, partials))
    elif count_rows(x):
        tensors = dy, dsum, x, weight, mean, rstd, dx
        partials = _launch_backward_first(call, tensors, form, num_parameters)
    else:
        return [dx, *(one.zero_() for one in dparameters)]
    if num_parameters:
        add_up(partials, *dparameters)
    return [dx, *dparameters]


def _empty_partials(x: Tensor, num_parameters: int, ctas: int) -> Tensor | None:
    """Return room for each CTA's part of the gradients of weight and bias."""
    shape = num_parameters, ctas, x.shape[-1]
    return empty(shape, torch.float32, x.device) if num_parameters else None


def _plan_for(dy: Tensor, dsum: Tensor | None, x: Tensor) -> tuple[BackwardPlan, int]:
    """Return the plan of a backward pass, and its CTAs."""
    num_rows, columns = count_rows(x), x.shape[-1]
    element_bytes = x.element_size() * (1 + (dsum is not None)) + dy.element_size()
    plan = plan_backward(columns, next_power_of_two(columns) * element_bytes)
    return plan, _count_ctas(-(-num_rows // plan.rows), plan.ctas_per_sm * num_sms(x.device))


def _launch_backward_first(call, tensors, form, num_parameters) -> Tensor | None:
    """Launch for the first call with such tensors; return the partial gradients."""
    dy, dsum, x, weight, *others = tensors
    plan, ctas = _plan_for(dy, dsum, x)
    partials = _empty_partials(x, num_parameters, ctas)
    tensors, others = (*tensors, partials), (*others, partials)
    num_rows, columns = count_rows(x), x.shape[-1]
    (rows, stride), (dys, dy_stride), weight = rows_of(x), rows_of(dy), _contiguous(weight)
    dsums, dsum_stride = (None, dy_stride) if dsum is None else rows_of(dsum)
    key = (
        *(x.device, x.dtype, dy.dtype, columns, form, num_parameters, dsum is None),
        None if weight is None else weight.dtype,
        alignments((rows, dys, dsums, weight, *others[:2]), stride, dy_stride, dsum_stride),
    )
    arguments = (
        *(dys, dsums, rows, weight, *others, dy_stride, dsum_stride, stride, num_rows),
        *(form, num_parameters, columns, plan.rows, plan.block, plan.stages),
        num_parameters > 0 and overlaps(x.device),
    )
    options = {"num_warps": plan.warps}
    if dsum is not None and columns == FITTED_COLUMNS:
        options["maxnreg"] = FITTED_REGISTERS
    _launch_backward(key, ctas, arguments, options, call=call, tensors=tensors)
    return partials


def add_up(partials: Tensor, dweight: Tensor, dbias: Tensor | None = None) -> None:
    """Add up partial gradients.

    Args:
        partials: (K, P, N), float32: of K parameters, by P CTAs.
        dweight: (N,), the gradient of the first parameter; written.
        dbias: The same of the second one; None: there is none.
    """
    tensors = partials, dweight, dbias
    call = partials.shape, dweight.dtype, partials.device
    if _launch_sum.again(call, tensors):
        return
    num_parameters, ctas, columns = partials.shape
    key = partials.device, dweight.dtype, columns, num_parameters
    is_overlapping = overlaps(partials.device)
    arguments = (*tensors, ctas, columns, TILE, BLOCK_OF_SUM, is_overlapping)
    grid = num_parameters * -(-columns // BLOCK_OF_SUM)
    options = {"num_warps": WARPS_OF_SUM, **({"launch_pdl": True} if is_overlapping else {})}
    _launch_sum(key, grid, arguments, options, call=call, tensors=tensors)


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Return whether programmatic dependent launch is available: from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _count_ctas(tiles: int, most: int) -> int:
    """Return the fewest CTAs that walk over so many tiles as fast as `most` do."""
    return -(-tiles // -(-tiles // min(tiles, most)))


def _contiguous(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.contiguous()


@triton.jit(do_not_specialize=["num_rows"])
def norm_forward(
    x_MN,
    residual_MN,
    weight_N,
    bias_N,
    y_MN,
    sum_MN,
    mean_2M,
    rstd_M,
    x_stride: tl.int64,
    residual_stride: tl.int64,
    num_rows,
    eps,
    FORM: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_WEIGHT_EARLY: tl.constexpr,
):
    """Normalise rows, after adding the residual if there is one."""
    columns = tl.arange(0, BLOCK)[None, :]
    rows = tl.arange(0, ROWS).to(tl.int64) + tl.program_id(0) * ROWS
    is_row, is_column = rows < num_rows, columns < COLUMNS
    mask = is_row[:, None] & is_column
    x = tl.load(x_MN + rows[:, None] * x_stride + columns, mask, other=0.0)
    if residual_MN is not None:
        residual = tl.load(residual_MN + rows[:, None] * residual_stride + columns, mask, other=0.0)
        x = (residual.to(tl.float32) + x.to(tl.float32)).to(x.dtype)
        tl.store(sum_MN + rows[:, None] * COLUMNS + columns, x, mask)
    if IS_WEIGHT_EARLY and weight_N is not None:
        weight = tl.load(weight_N + columns, is_column, other=0.0)
    y = x.to(tl.float32)
    if FORM == LAYER:
        y = _centred(y, mean_2M, rows, num_rows, is_column, COLUMNS)
    rstd = tl.rsqrt(tl.sum(y * y, axis=1) * (1.0 / COLUMNS) + eps)
    if rstd_M is not None:
        tl.store(rstd_M + rows, rstd, is_row)
    y = _rounded(y * rstd[:, None], x.dtype, FORM)
    if weight_N is not None:
        if not IS_WEIGHT_EARLY:
            weight = tl.load(weight_N + columns, is_column, other=0.0)
        y *= _factor(weight, FORM)
    if bias_N is not None:
        y += tl.load(bias_N + columns, is_column, other=0.0).to(tl.float32)
    y = y.to(y_MN.dtype.element_ty)
    tl.store(y_MN + rows[:, None] * COLUMNS + columns, y, mask)


@triton.jit
def _centred(y, mean_2M, rows, num_rows, is_column, COLUMNS: tl.constexpr):
    """Subtract the mean, and store it."""
    centre = tl.sum(y, axis=1) * (1.0 / COLUMNS)
    # The rounding error of a large mean matters: it is subtracted and stored, too.
    rest = tl.sum(tl.where(is_column, y - centre[:, None], 0.0), axis=1) * (1.0 / COLUMNS)
    if mean_2M is not None:
        tl.store(mean_2M + rows, centre, rows < num_rows)
        tl.store(mean_2M + num_rows + rows, rest, rows < num_rows)
    return tl.where(is_column, y - centre[:, None] - rest[:, None], 0.0)


@triton.jit(do_not_specialize=["num_rows"])
def norm_backward(
    dy_MN,
    dsum_MN,
    x_MN,
    weight_N,
    mean_2M,
    rstd_M,
    dx_MN,
    dparameters_KPN,
    dy_stride: tl.int64,
    dsum_stride: tl.int64,
    x_stride: tl.int64,
    num_rows,
    FORM: tl.constexpr,
    PARAMETERS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Write the gradients of rows, and the CTA's part of those of weight and bias."""
    _launch_dependents(OVERLAPS)
    columns = tl.arange(0, BLOCK)[None, :]
    is_column = columns < COLUMNS
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)
    dbias = tl.zeros((ROWS, BLOCK), tl.float32)
    first, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    for row in tl.range(first, num_rows, step, num_stages=STAGES):
        rows = tl.arange(0, ROWS).to(tl.int64) + row
        is_row = rows < num_rows
        mask = is_row[:, None] & is_column
        dy = tl.load(dy_MN + rows[:, None] * dy_stride + columns, mask, other=0.0).to(tl.float32)
        normed = tl.load(x_MN + rows[:, None] * x_stride + columns, mask, other=0.0)
        normed = normed.to(tl.float32)
        rstd = tl.load(rstd_M + rows, is_row, other=0.0)[:, None]
        if FORM == LAYER:
            normed -= tl.load(mean_2M + rows, is_row, other=0.0)[:, None]
            normed -= tl.load(mean_2M + num_rows + rows, is_row, other=0.0)[:, None]
        normed *= rstd
        dnormed = dy
        if weight_N is not None:
            # Loaded where it is used: it is in a cache, and registers are scarce.
            weight = tl.load(weight_N + columns, is_column, other=0.0)
            dnormed *= _factor(weight, FORM)
        # Without parameters these are unused, and the compiler removes them.
        dweight += dy * normed
        dbias += dy
        dx = dnormed - normed * (tl.sum(dnormed * normed, axis=1) * (1.0 / COLUMNS))[:, None]
        if FORM == LAYER:
            dx -= (tl.sum(dnormed, axis=1) * (1.0 / COLUMNS))[:, None]
        dx *= rstd
        if dsum_MN is not None:
            dx += tl.load(dsum_MN + rows[:, None] * dsum_stride + columns, mask, other=0.0)
        dx = dx.to(dx_MN.dtype.element_ty)
        tl.store(dx_MN + rows[:, None] * COLUMNS + columns, dx, mask)
    if PARAMETERS > 0:
        partials = dparameters_KPN + tl.program_id(0).to(tl.int64) * COLUMNS + columns
        _store_sum(partials, dweight, is_column)
        if PARAMETERS > 1:
            _store_sum(partials + tl.num_programs(0).to(tl.int64) * COLUMNS, dbias, is_column)


@triton.jit
def _launch_dependents(OVERLAPS: tl.constexpr):
    """Let CTAs of the next kernel start as soon as they fit: programmatic dependent launch."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _store_sum(places, values, is_column):
    tl.store(places, tl.sum(values, axis=0)[None, :], is_column)


@triton.jit
def _rounded(y, dtype: tl.constexpr, FORM: tl.constexpr):
    return y.to(dtype).to(tl.float32) if FORM == LLAMA else y


@triton.jit
def _factor(weight, FORM: tl.constexpr):
    weight = weight.to(tl.float32)
    return weight + 1.0 if FORM == GEMMA else weight


@triton.jit(do_not_specialize=["num_programs"])
def sum_partials(
    partial_KPN,
    dweight_N,
    dbias_N,
    num_programs,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Add the partial gradients of all CTAs, in their order."""
    if OVERLAPS:
        # This kernel starts before the one that stores the partial sums has ended.
        tl.extra.cuda.gdc_wait()
    blocks: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    parameter = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < COLUMNS
    total = tl.zeros((TILE, BLOCK), tl.float32)
    for first in range(0, num_programs, TILE):
        programs = tl.arange(0, TILE) + first
        places = (parameter * num_programs + programs)[:, None] * COLUMNS + columns[None, :]
        mask = (programs < num_programs)[:, None] & is_column[None, :]
        total += tl.load(partial_KPN + places, mask, other=0.0)
    summed = tl.sum(total, axis=0).to(dweight_N.dtype.element_ty)
    if parameter == 0:
        tl.store(dweight_N + columns, summed, is_column)
    elif dbias_N is not None:
        tl.store(dbias_N + columns, summed, is_column)


_launch_forward = Launcher(norm_forward)
_launch_backward = Launcher(norm_backward)
_launch_sum = Launcher(sum_partials)
_with_gradient = applied(_WithGradient)
_forward = define(
    "norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, int form,"
    " bool keeps, ScalarType? dtype=None) -> Tensor[]",
    _run_forward,
    _empty_results,
)
_backward = define(
    "norm_backward(Tensor dy, Tensor? dsum, Tensor x, Tensor? weight, Tensor rstd,"
    " Tensor? mean, int form, int num_parameters) -> Tensor[]",
    _run_backward,
    _empty_gradients,
)


def _why_not(form: str, x: Tensor, *parameters: Tensor | None) -> str | None:
    """Return why rows of x, or these weights and biases, are not taken; None: they are."""
    if x.dtype not in DTYPES:
        return f"{x.dtype} is none of float32, float16 and bfloat16"
    if form in ("torch", "layer") and is_widened(x):
        return "autocast is on, and makes this float32"
    if x.dim() == 0 or x.shape[-1] > MOST_COLUMNS[form]:
        return f"rows of {tuple(x.shape)[-1:]} columns: at most {MOST_COLUMNS[form]:,} fit"
    for one in parameters:
        if one is not None and one.shape != x.shape[-1:]:
            return f"a weight or bias of shape {tuple(one.shape)} for rows of {x.shape[-1]} columns"
        if one is not None and one.dtype not in (x.dtype, *([] if form == "layer" else DTYPES[:1])):
            return f"the weight or bias is {one.dtype}, the input {x.dtype}"
    return None


def _rmsnorm_refuses(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, form: str = "llama"
) -> str | None:
    return _why_not(form, x, weight)


def _layernorm_refuses(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> str | None:
    return _why_not("layer", x, weight, bias)


def _add_rmsnorm_refuses(x: Tensor, residual: Tensor, *options: Any) -> str | None:
    return _why_no_residual(x, residual) or _rmsnorm_refuses(x, *options)


def _add_layernorm_refuses(x: Tensor, residual: Tensor, *options: Any) -> str | None:
    return _why_no_residual(x, residual) or _layernorm_refuses(x, *options)


def _why_no_residual(x: Tensor, residual: Tensor) -> str | None:
    is_wider = torch.promote_types(x.dtype, residual.dtype) != x.dtype
    if residual.shape != x.shape or is_wider or not residual.is_floating_point():
        return f"a residual {tuple(residual.shape)} {residual.dtype} for {tuple(x.shape)} {x.dtype}"
    return None


def _draw_terms(shape: Shape, draw: Draw) -> tuple[Tensor, Tensor]:
    """Return x and residual: in float32, an odd number of rows has a bfloat16 residual."""
    x, residual = draw(*shape), draw(*shape)
    is_mixed = x.dtype == torch.float32 and math.prod(shape[:-1]) % 2
    return x, residual.to(torch.bfloat16) if is_mixed else residual


def _work(tensors: int, flops: int, parameters: slice, passes: int = 1) -> Callable[..., Work]:
    """Return a function that counts the work of a call.

    Args:
        tensors: Tensors like x that are read or written.
        flops: Of an element.
        parameters: Where weight and bias stand among the arguments.
        passes: How often they are read or written.
    """

    def count(x: Tensor, *others: Any) -> Work:
        given = [one for one in (x, *others)[parameters] if one is not None]
        once = sum(one.numel() * one.element_size() for one in given)
        return Work(flops * x.numel(), tensors * x.numel() * x.element_size() + passes * once)

    return count


def _aten(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


def _liger_rmsnorm() -> Any:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    # Arguments after eps: offset, casting as in Llama, and not in place of dy.
    return lambda x, weight, eps=1e-6: LigerRMSNormFunction.apply(
        x, weight, eps, 0.0, "llama", False
    )


def _liger_add_rmsnorm() -> Any:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    # Arguments after eps: offset, casting as in Llama, and not in place of dy.
    return lambda x, residual, weight, eps=1e-6: LigerFusedAddRMSNormFunction.apply(
        x, residual, weight, eps, 0.0, "llama", False
    )


def _liger_layernorm() -> Any:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return lambda x, weight, bias, eps=1e-5: LigerLayerNormFunction.apply(x, weight, bias, eps)


def _quack_rmsnorm() -> Any:
    from quack import rmsnorm as quack_rmsnorm

    return lambda x, weight, eps=1e-6: quack_rmsnorm(x, weight, eps=eps)


def _quack_add_rmsnorm() -> Any:
    from quack import rmsnorm as quack_rmsnorm

    return lambda x, residual, weight, eps=1e-6: quack_rmsnorm(
        x, weight, residual=residual, eps=eps, prenorm=True
    )


def _compiled(reference: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: torch.compile(reference, dynamic=False)


_add_rmsnorm_reference = _after_add(_rmsnorm_reference)
_add_layernorm_reference = _after_add(_layernorm_reference)

RMSNORM = Kernel(
    name="rmsnorm",
    replaces="the RMSNorm modules of Hugging Face, and torch.nn.RMSNorm",
    reference=_rmsnorm_reference,
    truth=_rmsnorm_truth,
    providers=(
        Provider(OURS, lambda: rmsnorm, "kprof"),
        Provider("eager", lambda: _rmsnorm_reference),
        Provider("inductor", _compiled(_rmsnorm_reference)),
        Provider("aten", lambda: _aten),
        Provider("liger", _liger_rmsnorm, "liger-kernel"),
        Provider("quack", _quack_rmsnorm, "quack-kernels"),
    ),
    refuses=_rmsnorm_refuses,
    inputs=lambda shape, draw: (draw(*shape), draw.plain(shape[-1], scale=0.1, shift=1.0)),
    work=_work(2, 4, slice(1, 2)),
    shapes=tuple((m, n) for m in (8_192, 32_768) for n in (2_048, 4_096, 8_192, 16_384)),
    edges=((5, 127), (3, 4_097), (2, 16_384)),
    free=(0, 1),
    reach=(2**20,),
    differentiable=(0, 1),
    backward_work=_work(3, 10, slice(1, 2), passes=2),
    rows=(0,),
    sources=(
        "Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv 1910.07467",
        "transformers, LlamaRMSNorm, Olmo2RMSNorm and GemmaRMSNorm: the order in which they round",
    ),
)
ADD_RMSNORM = replace(
    RMSNORM,
    name="add_rmsnorm",
    replaces="a residual add and the RMSNorm after it, as in the decoder layers of Hugging Face",
    reference=_add_rmsnorm_reference,
    truth=_add_rmsnorm_truth,
    providers=(
        Provider(OURS, lambda: add_rmsnorm, "kprof"),
        Provider("eager", lambda: _add_rmsnorm_reference),
        Provider("inductor", _compiled(_add_rmsnorm_reference)),
        Provider("aten", lambda: _after_add(_aten)),
        Provider("liger", _liger_add_rmsnorm, "liger-kernel"),
        Provider("quack", _quack_add_rmsnorm, "quack-kernels"),
    ),
    refuses=_add_rmsnorm_refuses,
    inputs=lambda shape, draw: (
        *_draw_terms(shape, draw),
        draw.plain(shape[-1], scale=0.1, shift=1.0),
    ),
    work=_work(4, 5, slice(2, 3)),
    differentiable=(0, 1, 2),
    backward_work=_work(4, 11, slice(2, 3), passes=2),
    rows=(0, 1),
    sources=("transformers, LlamaDecoderLayer: the sum is rounded before it is normalised",),
)
LAYERNORM = Kernel(
    name="layernorm",
    replaces="torch.nn.LayerNorm over the last dimension",
    reference=_layernorm_reference,
    truth=_layernorm_truth,
    providers=(
        Provider(OURS, lambda: layernorm, "kprof"),
        Provider("aten", lambda: _layernorm_reference),
        Provider("inductor", _compiled(_layernorm_reference)),
        Provider("liger", _liger_layernorm, "liger-kernel"),
    ),
    refuses=_layernorm_refuses,
    inputs=lambda shape, draw: (
        draw(*shape),
        draw.plain(shape[-1], scale=0.1, shift=1.0),
        draw.plain(shape[-1], scale=0.1),
    ),
    work=_work(2, 7, slice(1, 3)),
    shapes=tuple((m, n) for m in (8_192, 32_768) for n in (1_024, 4_096, 8_192)),
    edges=((5, 127), (3, 4_097), (2, 8_192)),
    reach=(2**19,),
    differentiable=(0, 1, 2),
    backward_work=_work(3, 14, slice(1, 3), passes=2),
    rows=(0,),
    sources=("Ba, Kiros and Hinton, Layer Normalization, arXiv 1607.06450",),
)
ADD_LAYERNORM = replace(
    LAYERNORM,
    name="add_layernorm",
    replaces="a residual add and the torch.nn.LayerNorm after it",
    reference=_add_layernorm_reference,
    truth=_add_layernorm_truth,
    providers=(
        Provider(OURS, lambda: add_layernorm, "kprof"),
        Provider("eager", lambda: _add_layernorm_reference),
        Provider("inductor", _compiled(_add_layernorm_reference)),
    ),
    refuses=_add_layernorm_refuses,
    inputs=lambda shape, draw: (
        *_draw_terms(shape, draw),
        draw.plain(shape[-1], scale=0.1, shift=1.0),
        draw.plain(shape[-1], scale=0.1),
    ),
    work=_work(4, 8, slice(2, 4)),
    differentiable=(0, 1, 2, 3),
    backward_work=_work(4, 15, slice(2, 4), passes=2),
    rows=(0, 1),
    sources=("torch.nn.TransformerEncoderLayer: the sum is rounded before it is normalised",),
)
KERNELS = (RMSNORM, ADD_RMSNORM, LAYERNORM, ADD_LAYERNORM)
