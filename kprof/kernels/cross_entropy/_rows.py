"""Kernels over rows of logits: losses, gradients, their reduction.

A row of V logits is swept twice: for its maximum and sum of exponentials, then for its gradient.
So few rows are in flight that the second sweep hits L2. Within a sweep every thread keeps a maximum
and a sum of its own.

Where two rows per SM fit L2, the first tiles of a row stay in registers (register-resident, a whole
row of up to 64 KB), and only the others are read twice; while one CTA waits, the other one of its
SM works. Such a row is summed without its maximum: exponentials are taken relative to the target's
logit. If that overflows or gives NaN, the row is summed again with its maximum.

Entered by `write_losses`, `write_gradients`, `merge_chunk`, `write_reduced` and `scale_once`. M is
rows, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kprof.kernels.runtime import (
    IS_INTERPRETED,
    Launcher,
    alignments,
    define,
    kind_of,
    next_power_of_two,
)

LOG2_E = tl.constexpr(1.4426950408889634)
# Largest sum of exponentials relative to the target's logit, whose own term is 1. For larger ones
# the maximum is the reference, so that no value leaves the range of float32.
MOST = tl.constexpr(2.0**60)
# Targets that a CTA counts at a time: enough that it seldom waits for memory twice.
TARGETS = tl.constexpr(4_096)
VECTOR_BYTES, VECTORS_PER_THREAD = 16, 4
WARPS_PER_SM, MOST_ROWS_PER_SM = 32, 16
# Share of L2 for rows between their two sweeps; the rest is for writes.
SHARE_OF_L2 = 0.6
# Register-resident rows: warps per CTA, CTAs per SM, and the shortest row in tiles. A thread has 64
# registers and a tile takes four of them: eight tiles fit, or six if the row has more.
RESIDENT_WARPS, RESIDENT_ROWS, LEAST_RESIDENT_TILES = 16, 2, 4
MOST_RESIDENT_TILES, RESIDENT_TILES_OF_LONG_ROWS, RESIDENT_REGISTERS = 8, 6, 64
# In float32 the lost digits of a sum without the maximum would show.
RESIDENT_DTYPES = (torch.bfloat16, torch.float16)
# Inline PTX and a register limit: neither in the interpreter nor on AMD.
HAS_PTX = not IS_INTERPRETED and torch.version.hip is None
# Without a GPU, those of an H200.
SMS_WITHOUT_GPU = 132
L2_BYTES_WITHOUT_GPU = 60 * 2**20
_Kind = tuple[Hashable, ...]
# As many as most calls have rows, so that the CTA waits for memory once.
ELEMENTS_PER_SUM = 8_192
ELEMENTS_PER_CTA = 4_096
# Enough to be fast, and few for a factor of 1, when there is nothing to do.
MOST_CTAS = 1_056


class Options(NamedTuple):
    """Options of the loss."""

    ignore_index: int
    smoothing: float
    z_loss: float
    reduction: str


class _Plan(NamedTuple):
    """How rows are distributed. It does not depend on their number."""

    num_warps: int
    rows_at_once: int
    """Over the whole GPU."""
    tile: tuple[int, int, bool]
    """Lanes, elements of a lane, and whether these are contiguous."""
    num_resident: int = 0
    """Tiles of a row that stay in registers; 0: the row is swept twice."""


def write_losses(
    logits: Tensor,
    targets: Tensor,
    divisor: Tensor | None,
    options: Options,
    losses: Tensor,
    state: Tensor,
    dlogits: Tensor | None,
) -> None:
    """Write each row's loss and, into `dlogits` if it is given, its gradient.

    Args:
        logits: (M, V), with contiguous columns.
        targets: (M,), contiguous int64.
        divisor: One float32, of sum and gradient; None: a mean counts the targets.
        options: Of the loss.
        losses: (M,) float32.
        state: (2 M + 1,) float32; gets maxima, sums and the divisor.
        dlogits: (M, V), with contiguous columns; it may be `logits`.
    """
    tensors = (logits, targets, divisor, losses, state, dlogits)
    call = kind_of(*tensors), options
    if _launch_losses.again(call, tensors) or _launch_losses_resident.again(call, tensors):
        return
    num_rows, num_columns = logits.shape
    kind = _kind_of(logits, logits if dlogits is None else dlogits)
    is_mean, is_smoothed = options.reduction == "mean", options.smoothing != 0
    plan = (None if is_smoothed else _plan_resident(*kind)) or _plan(*kind)
    ctas = min(num_rows, plan.rows_at_once)
    types = targets.dtype, None if divisor is None else divisor.dtype, dlogits is None
    alignment = alignments((targets, divisor, losses, state))
    key = kind, types, is_mean, is_smoothed, alignment
    strides = logits.stride(0), logits.stride(0) if dlogits is None else dlogits.stride(0)
    how: dict[str, int] = {"num_warps": plan.num_warps}
    arguments: tuple[Any, ...]
    if plan.num_resident:
        launcher = _launch_losses_resident
        arguments = (num_rows, ctas, options.ignore_index, options.z_loss, is_mean, num_columns)
        arguments += (plan.num_resident, *plan.tile[:2], HAS_PTX)
        if HAS_PTX:
            how["maxnreg"] = RESIDENT_REGISTERS
    else:
        launcher = _launch_losses
        arguments = (num_rows, num_columns, ctas, options.ignore_index, options.smoothing)
        arguments += (options.z_loss, is_mean, is_smoothed, *plan.tile)
    arguments = (*tensors, *strides, *arguments)
    launcher(key, ctas, arguments, how, call=call, tensors=tensors)


def write_gradients(
    dloss: Tensor,
    logits: Tensor,
    targets: Tensor,
    options: Options,
    state: Tensor,
    dlogits: Tensor,
    chunk: tuple[int, int] | None = None,
) -> None:
    """Write the gradient of each row into `dlogits`, which may be `logits`.

    Args:
        dloss: One element, or one per row without a reduction.
        logits: (M, V), with contiguous columns.
        targets: (M,), contiguous int64.
        options: Of the loss.
        state: (2 M + 1,): maxima, sums and the divisor.
        dlogits: (M, V), with contiguous columns.
        chunk: First column, and size of the vocabulary; None: logits have the whole vocabulary.
    """
    num_rows, num_columns = logits.shape
    kind = _kind_of(logits, dlogits)
    plan = _plan(*kind)
    ctas = min(num_rows, plan.rows_at_once)
    key = kind, dloss.dtype, alignments((dloss, targets, state))
    arguments = (
        *(dloss, logits, targets, state, dlogits, dloss.stride(0) if dloss.dim() else 0),
        *(logits.stride(0), dlogits.stride(0), num_rows, num_columns, ctas),
        *(options.ignore_index, *(chunk or (0, num_columns))),
        *(options.smoothing, options.z_loss, *plan.tile),
    )
    _launch_gradients(key, ctas, arguments, {"num_warps": plan.num_warps})


def merge_chunk(
    logits: Tensor, targets: Tensor, state: Tensor, first_column: int, is_smoothed: bool
) -> None:
    """Merge the logits of a part of the vocabulary into the `state` of each row.

    Args:
        logits: (M, columns of the part), with contiguous columns.
        targets: (M,), contiguous int64.
        state: (4, M): maxima, sums of exponentials relative to them, targets' logits, plain sums.
        first_column: First column of the part.
        is_smoothed: Whether plain sums are needed.
    """
    num_rows, num_columns = logits.shape
    kind = _kind_of(logits, logits)
    plan = _plan(*kind)
    key = kind, is_smoothed, alignments((targets, state))
    arguments = (
        *(logits, targets, state, logits.stride(0), num_rows, num_columns, first_column),
        *(is_smoothed, *plan.tile),
    )
    _launch_merge(key, num_rows, arguments, {"num_warps": plan.num_warps})


def _kind_of(logits: Tensor, dlogits: Tensor) -> _Kind:
    """Return everything about the two matrices that a binary and a plan depend on."""
    strides = logits.stride(0), dlogits.stride(0)
    return (
        logits.device,
        logits.dtype,
        logits.shape[1],
        *strides,
        alignments((logits, dlogits)),
    )


@cache
def _plan(
    device: torch.device,
    dtype: torch.dtype,
    num_columns: int,
    stride: int,
    dstride: int,
    alignment: Hashable,
) -> _Plan:
    """Return the plan for rows that are swept twice."""
    rows_per_sm = _rows_per_sm(device, dtype, num_columns)
    rows_per_sm = 1 << (min(max(rows_per_sm, 1), MOST_ROWS_PER_SM).bit_length() - 1)
    vector = VECTOR_BYTES // dtype.itemsize
    is_even = _is_even(dtype, num_columns, stride, dstride, alignment)
    vectors = next_power_of_two(-(-num_columns // vector))
    num_warps = max(1, min(WARPS_PER_SM // rows_per_sm, vectors // 32))
    each = VECTORS_PER_THREAD if is_even else VECTORS_PER_THREAD // 2
    lanes = min(vectors, 32 * num_warps * each)
    return _Plan(num_warps, rows_per_sm * _limits(device)[0], (lanes, vector, is_even))


@cache
def _plan_resident(
    device: torch.device,
    dtype: torch.dtype,
    num_columns: int,
    stride: int,
    dstride: int,
    alignment: Hashable,
) -> _Plan | None:
    """Return the plan for register-resident rows; None where it is not faster."""
    lanes, vector = 32 * RESIDENT_WARPS, VECTOR_BYTES // dtype.itemsize
    is_fit = _rows_per_sm(device, dtype, num_columns) >= RESIDENT_ROWS
    is_long = num_columns >= LEAST_RESIDENT_TILES * lanes * vector
    is_even = _is_even(dtype, num_columns, stride, dstride, alignment)
    if is_fit and is_long and is_even and dtype in RESIDENT_DTYPES:
        num_tiles = -(-num_columns // (lanes * vector))
        is_whole = num_tiles <= MOST_RESIDENT_TILES
        num_resident = num_tiles if is_whole else RESIDENT_TILES_OF_LONG_ROWS
        rows_at_once = RESIDENT_ROWS * _limits(device)[0]
        return _Plan(RESIDENT_WARPS, rows_at_once, (lanes, vector, True), num_resident)
    return None


def _rows_per_sm(device: torch.device, dtype: torch.dtype, num_columns: int) -> int:
    """Return the rows per SM that fit the L2 cache."""
    num_sms, l2_bytes = _limits(device)
    return int(SHARE_OF_L2 * l2_bytes / (num_columns * dtype.itemsize * num_sms))


def _is_even(
    dtype: torch.dtype, num_columns: int, stride: int, dstride: int, alignment: Hashable
) -> bool:
    """Return whether all vectors of all rows are aligned."""
    vector = VECTOR_BYTES // dtype.itemsize
    return alignment == 0 and not any(n % vector for n in (num_columns, stride, dstride))


@cache
def _limits(device: torch.device) -> tuple[int, int]:
    """Return the number of SMs, and the bytes of the L2 cache."""
    if device.type != "cuda":
        return SMS_WITHOUT_GPU, L2_BYTES_WITHOUT_GPU
    properties = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count), int(properties.L2_cache_size)


def write_reduced(losses: Tensor, state: Tensor, loss: Tensor) -> None:
    """Write the sum of the losses, divided by the divisor in `state`."""
    tensors = (losses, state, loss)
    call = kind_of(*tensors)
    if _launch_reduced.again(call, tensors):
        return
    key = losses.device, alignments(tensors)
    arguments = (*tensors, losses.shape[0], ELEMENTS_PER_SUM)
    _launch_reduced(key, 1, arguments, {"num_warps": 16}, call=call, tensors=tensors)


def scale_once(gradient: Tensor, dloss: Tensor) -> Tensor:
    """Return the gradient times the arriving one; in place, unless the graph is kept."""
    if torch.compiler.is_compiling() or is_graph_kept():
        return _operator_scaled(gradient, dloss)
    _operator_scale(gradient, dloss)
    return gradient


def is_graph_kept() -> bool:
    """Return whether the running backward pass may run again, and needs its saved tensors."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def _run_scaled(x: Tensor, factor: Tensor) -> Tensor:
    x = x.contiguous()
    scaled = torch.empty_like(x)
    _write_scaled(x, factor, scaled)
    return scaled


def _run_scale(x: Tensor, factor: Tensor) -> None:
    if x.is_contiguous():
        _write_scaled(x, factor, x)
    else:
        x.copy_(_run_scaled(x, factor))


def _write_scaled(x: Tensor, factor: Tensor, y: Tensor) -> None:
    """Write x times a factor into y. If y is x, a factor of 1 costs no time."""
    tensors, is_in_place = (x, factor, y), x is y
    call = kind_of(*tensors), is_in_place
    size = x.numel()
    if _launch_scaled.again(call, tensors) or not size:
        return
    ctas = min(-(-size // ELEMENTS_PER_CTA), MOST_CTAS)
    kind = size % 16 == 0, size == 1
    key = x.device, x.dtype, factor.dtype, is_in_place, kind, alignments(tensors)
    arguments = (*tensors, size, ctas, is_in_place, ELEMENTS_PER_CTA)
    options = {"num_warps": 8}
    _launch_scaled(key, ctas, arguments, options, call=call, tensors=tensors)


@triton.jit
def divisor_of(
    divisor_1, targets_M, num_rows, ignore_index, IS_MEAN: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the given divisor, else for a mean the number of targets that count, as a float."""
    divisor = 1.0
    if divisor_1 is not None:
        divisor = tl.load(divisor_1).to(tl.float32)
    elif IS_MEAN:
        counts = tl.zeros((BLOCK,), tl.int32)
        for first in range(0, num_rows, BLOCK):
            rows = tl.arange(0, BLOCK) + first
            targets = tl.load(targets_M + rows, rows < num_rows, other=ignore_index)
            counts += (targets != ignore_index).to(tl.int32)
        divisor = tl.sum(counts, axis=0).to(tl.float32)
    return divisor


@triton.jit
def tile_columns(LANES: tl.constexpr, VECTOR: tl.constexpr, IS_EVEN: tl.constexpr):
    """Return the columns of the first tile; those of one lane belong to one thread.

    The columns of a lane are contiguous if they can be loaded at once; else the lanes are.
    """
    lanes, numbers = tl.arange(0, LANES)[:, None], tl.arange(0, VECTOR)[None, :]
    if IS_EVEN:
        return lanes * VECTOR + numbers
    return lanes + numbers * LANES


@triton.jit
def sweep_sums(
    row_V,
    num_columns,
    IS_SMOOTHED: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """Return the row's maximum (0 for -inf), its sum of exponentials, and its plain sum."""
    lanes = tile_columns(LANES, VECTOR, IS_EVEN)
    maximum = tl.full((LANES,), float("-inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    plain = tl.zeros((LANES,), tl.float32)
    for first in range(0, num_columns, LANES * VECTOR):
        columns = lanes + first
        is_column = columns < num_columns
        x = tl.load(row_V + columns, is_column, other=float("-inf"), eviction_policy="evict_last")
        x32 = x.to(tl.float32)
        higher = tl.maximum(maximum, tl.max(x32, axis=1))
        # As long as all values are -inf, -inf - -inf would be NaN.
        about = tl.where(higher == float("-inf"), 0.0, higher)
        total *= tl.exp2((maximum - about) * LOG2_E)
        total += tl.sum(tl.exp2((x32 - about[:, None]) * LOG2_E), axis=1)
        maximum = higher
        if IS_SMOOTHED:
            plain += tl.sum(tl.where(is_column, x32, 0.0), axis=1)
    highest = tl.max(maximum, axis=0)
    about = tl.where(highest == float("-inf"), 0.0, highest)
    return about, tl.sum(total * tl.exp2((maximum - about) * LOG2_E), axis=0), tl.sum(plain, axis=0)


@triton.jit
def _sweep_gradient(
    row_V,
    drow_V,
    num_columns,
    about,
    factor,
    each,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """Write exp(x - about) * factor - each, from the end, which is likely to be in the cache."""
    lanes = tile_columns(LANES, VECTOR, IS_EVEN)
    num_tiles = tl.cdiv(num_columns, LANES * VECTOR)
    for done in range(num_tiles):
        columns = lanes + (num_tiles - 1 - done) * (LANES * VECTOR)
        is_column = columns < num_columns
        x = tl.load(row_V + columns, is_column, other=0.0, eviction_policy="evict_first")
        dx = tl.exp2((x.to(tl.float32) - about) * LOG2_E) * factor - each
        dx = dx.to(drow_V.dtype.element_ty)
        tl.store(drow_V + columns, dx, is_column, eviction_policy="evict_first")


@triton.jit
def sweep_zeros(
    drow_V, num_columns, LANES: tl.constexpr, VECTOR: tl.constexpr, IS_EVEN: tl.constexpr
):
    """Write zeros over the row."""
    lanes = tile_columns(LANES, VECTOR, IS_EVEN)
    zeros = tl.zeros((LANES, VECTOR), drow_V.dtype.element_ty)
    for first in range(0, num_columns, LANES * VECTOR):
        columns = lanes + first
        tl.store(drow_V + columns, zeros, columns < num_columns, eviction_policy="evict_first")


@triton.jit
def write_gradient(
    row_V,
    drow_V,
    target,
    num_columns,
    about,
    total,
    scale,
    smoothing,
    z_loss,
    vocabulary,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """Write the gradient of a row, or of a part of it; `row_V` and `drow_V` may be the same."""
    is_inside = (target >= 0) & (target < num_columns)
    x = tl.load(row_V + target, is_inside, other=0.0).to(tl.float32)
    factor = scale * (1 + 2 * z_loss * (about + tl.log(total))) / total
    each = scale * smoothing / vocabulary
    # All threads must read the target's logit before one of them overwrites it.
    tl.debug_barrier()
    _sweep_gradient(row_V, drow_V, num_columns, about, factor, each, LANES, VECTOR, IS_EVEN)
    dx = tl.exp2((x - about) * LOG2_E) * factor - each - scale * (1 - smoothing)
    tl.debug_barrier()
    tl.store(drow_V + target, dx.to(drow_V.dtype.element_ty), is_inside)


@triton.jit(do_not_specialize=["num_rows", "num_programs", "ignore_index"])
def losses_kernel(
    logits_MV,
    targets_M,
    divisor_1,
    losses_M,
    state_M21,
    dlogits_MV,
    stride: tl.int64,
    dstride: tl.int64,
    num_rows,
    num_columns,
    num_programs,
    ignore_index,
    smoothing,
    z_loss,
    IS_MEAN: tl.constexpr,
    IS_SMOOTHED: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """Write the loss of every row, its maximum and sum, and the gradient if there is a place."""
    program = tl.program_id(0)
    divisor = divisor_of(divisor_1, targets_M, num_rows, ignore_index, IS_MEAN, LANES)
    if program == 0:
        tl.store(state_M21 + 2 * num_rows, divisor)
    for number in range(program, num_rows, num_programs):
        row = tl.zeros((), tl.int64) + number
        target = tl.load(targets_M + row)
        loss, about, total = 0.0, 0.0, 1.0
        if target == ignore_index:
            if dlogits_MV is not None:
                sweep_zeros(dlogits_MV + row * dstride, num_columns, LANES, VECTOR, IS_EVEN)
        else:
            row_V = logits_MV + row * stride
            # A target outside of the vocabulary is not read: its loss is NaN.
            is_inside = (target >= 0) & (target < num_columns)
            x = tl.load(row_V + target, is_inside, other=float("nan")).to(tl.float32)
            about, total, plain = sweep_sums(
                row_V, num_columns, IS_SMOOTHED, LANES, VECTOR, IS_EVEN
            )
            log_total = tl.log(total)
            loss = log_total - (x - about)
            if IS_SMOOTHED:
                smooth = log_total - (plain / num_columns - about)
                loss = loss * (1 - smoothing) + smooth * smoothing
            loss += z_loss * (about + log_total) * (about + log_total)
            if dlogits_MV is not None:
                scale = tl.where(is_inside, 1.0 / divisor, float("nan"))
                write_gradient(
                    row_V,
                    dlogits_MV + row * dstride,
                    target,
                    num_columns,
                    about,
                    total,
                    scale,
                    smoothing,
                    z_loss,
                    num_columns,
                    LANES,
                    VECTOR,
                    IS_EVEN,
                )
        tl.store(losses_M + row, loss)
        tl.store(state_M21 + row, about)
        tl.store(state_M21 + num_rows + row, total)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_programs",
        "ignore_index",
        "dloss_stride",
        "first_column",
        "vocabulary",
    ]
)
def gradients_kernel(
    dloss_M,
    logits_MV,
    targets_M,
    state_M21,
    dlogits_MV,
    dloss_stride,
    stride: tl.int64,
    dstride: tl.int64,
    num_rows,
    num_columns,
    num_programs,
    ignore_index,
    first_column,
    vocabulary,
    smoothing,
    z_loss,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """Write the gradient of every row, from the maximum and the sum of an earlier pass.

    The columns may be a part of the vocabulary, from `first_column` on.
    """
    divisor = tl.load(state_M21 + 2 * num_rows)
    for number in range(tl.program_id(0), num_rows, num_programs):
        row = tl.zeros((), tl.int64) + number
        target = tl.load(targets_M + row)
        drow_V = dlogits_MV + row * dstride
        if target == ignore_index:
            sweep_zeros(drow_V, num_columns, LANES, VECTOR, IS_EVEN)
        else:
            scale = tl.load(dloss_M + row * dloss_stride).to(tl.float32) / divisor
            scale = tl.where((target >= 0) & (target < vocabulary), scale, float("nan"))
            about = tl.load(state_M21 + row)
            total = tl.load(state_M21 + num_rows + row)
            write_gradient(
                logits_MV + row * stride,
                drow_V,
                target - first_column,
                num_columns,
                about,
                total,
                scale,
                smoothing,
                z_loss,
                vocabulary,
                LANES,
                VECTOR,
                IS_EVEN,
            )


@triton.jit(do_not_specialize=["num_rows", "first_column"])
def merge_kernel(
    logits_MV,
    targets_M,
    state_4M,
    stride: tl.int64,
    num_rows,
    num_columns,
    first_column,
    IS_SMOOTHED: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """Merge a part of the vocabulary into the state of each row.

    It is the maximum, the sum of exponentials relative to it, the target's logit, the plain sum.
    """
    row = tl.program_id(0).to(tl.int64)
    row_V = logits_MV + row * stride
    target = tl.load(targets_M + row) - first_column
    is_inside = (target >= 0) & (target < num_columns)
    x = tl.load(row_V + target, is_inside, other=0.0).to(tl.float32)
    about, total, plain = sweep_sums(row_V, num_columns, IS_SMOOTHED, LANES, VECTOR, IS_EVEN)
    row_4 = state_4M + row
    about_before, total_before = tl.load(row_4), tl.load(row_4 + num_rows)
    # A part of -inf alone has a sum of 0, and does not change the reference.
    about = tl.where(total == 0.0, about_before, about)
    higher = tl.where(total_before == 0.0, about, tl.maximum(about, about_before))
    total = total * tl.exp2((about - higher) * LOG2_E)
    total += total_before * tl.exp2(
        tl.where(total_before == 0.0, 0.0, about_before - higher) * LOG2_E
    )
    tl.store(row_4, higher)
    tl.store(row_4 + num_rows, total)
    if is_inside:
        tl.store(row_4 + 2 * num_rows, x)
    if IS_SMOOTHED:
        tl.store(row_4 + 3 * num_rows, tl.load(row_4 + 3 * num_rows) + plain)


@triton.jit(do_not_specialize=["num_rows", "num_programs", "ignore_index"])
def losses_resident_kernel(
    logits_MV,
    targets_M,
    divisor_1,
    losses_M,
    state_M21,
    dlogits_MV,
    stride: tl.int64,
    dstride: tl.int64,
    num_rows,
    num_programs,
    ignore_index,
    z_loss,
    IS_MEAN: tl.constexpr,
    COLUMNS: tl.constexpr,
    RESIDENT: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    HAS_PTX: tl.constexpr,
):
    """Write the loss of every row, the reference of its exponentials, their sum, and the gradient.

    `RESIDENT` is the number of tiles of a row in registers; a shorter row has all its tiles there.
    """
    first_row = tl.program_id(0).to(tl.int64)
    divisor = divisor_of(divisor_1, targets_M, num_rows, ignore_index, IS_MEAN, TARGETS)
    if first_row == 0:
        tl.store(state_M21 + 2 * num_rows, divisor)
    row = first_row
    while row < num_rows:
        row_V = logits_MV + row * stride
        resident = _resident_tiles(row_V, COLUMNS, RESIDENT, LANES, VECTOR)
        target = tl.load(targets_M + row)
        loss, about, total = 0.0, 0.0, 1.0
        if target == ignore_index:
            if dlogits_MV is not None:
                sweep_zeros(dlogits_MV + row * dstride, COLUMNS, LANES, VECTOR, True)
        else:
            is_inside = (target >= 0) & (target < COLUMNS)
            logit = tl.load(row_V + target, is_inside, other=float("nan")).to(tl.float32)
            about, total = _sum_up(row_V, resident, logit, COLUMNS, LANES, VECTOR)
            log_total = tl.log(total)
            loss = log_total - (logit - about) + z_loss * (about + log_total) * (about + log_total)
            if dlogits_MV is not None:
                scale = tl.where(is_inside, 1.0 / divisor, float("nan"))
                factor = scale * (1 + 2 * z_loss * (about + log_total)) / total
                drow_V = dlogits_MV + row * dstride
                # Always 0, which the compiler cannot know.
                nothing = (row >> 62).to(tl.int16)
                places = row_V, drow_V, nothing
                _write_row(places, resident, about, factor, COLUMNS, LANES, VECTOR, HAS_PTX)
                dx = tl.exp2((logit - about) * LOG2_E) * factor - scale
                # After the thread that wrote the tile with the target.
                tl.debug_barrier()
                tl.store(drow_V + target, dx.to(drow_V.dtype.element_ty), is_inside)
        tl.store(losses_M + row, loss)
        tl.store(state_M21 + row, about)
        tl.store(state_M21 + num_rows + row, total)
        row += num_programs


@triton.jit
def _tile(
    row_V,
    number,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    POLICY: tl.constexpr,
):
    first, columns = number * (LANES * VECTOR), tile_columns(LANES, VECTOR, True)
    is_column = columns < COLUMNS - first
    # One address and a distance: an address per tile would take registers.
    return tl.load(row_V + first + columns, is_column, other=float("-inf"), eviction_policy=POLICY)


@triton.jit
def _resident_tiles(
    row_V, COLUMNS: tl.constexpr, RESIDENT: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr
):
    """Return the first tiles of the row; their loads are independent."""
    resident = ()
    for number in tl.static_range(RESIDENT):
        tile = _tile(row_V, number, COLUMNS, LANES, VECTOR, "evict_first")
        resident += (tile,)  # type: ignore[assignment]
    return resident


@triton.jit
def _sum_up(
    row_V, resident, logit, COLUMNS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr
):
    """Return the reference of the exponentials, and their sum."""
    RESIDENT: tl.constexpr = len(resident)
    TILES: tl.constexpr = (COLUMNS + LANES * VECTOR - 1) // (LANES * VECTOR)
    sums = tl.zeros((LANES,), tl.float32)
    if RESIDENT < TILES:
        x = _tile(row_V, RESIDENT, COLUMNS, LANES, VECTOR, "evict_last")
    for number in tl.static_range(RESIDENT):
        sums += _exponentials(resident[number], logit)
    if RESIDENT < TILES:
        for streamed in range(RESIDENT + 1, TILES):
            following = _tile(row_V, streamed, COLUMNS, LANES, VECTOR, "evict_last")
            sums += _exponentials(x, logit)
            x = following
        sums += _exponentials(x, logit)
    about, total = logit, tl.sum(sums, axis=0)
    # Written so that NaN is too large, too.
    if not (total < MOST):
        about, total, _ = sweep_sums(row_V, COLUMNS, False, LANES, VECTOR, True)
    return about, total


@triton.jit
def _exponentials(x, about):
    """Return the sum of exponentials over the columns of each lane."""
    return tl.sum(tl.exp2((x.to(tl.float32) - about) * LOG2_E), axis=1)


@triton.jit
def _write_row(
    places,
    resident,
    about,
    factor,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    HAS_PTX: tl.constexpr,
):
    """Write exp(x - about) * factor; resident tiles while the last other tile is being loaded."""
    row_V, drow_V, nothing = places
    RESIDENT: tl.constexpr = len(resident)
    TILES: tl.constexpr = (COLUMNS + LANES * VECTOR - 1) // (LANES * VECTOR)
    if RESIDENT < TILES:
        x = _tile(row_V, TILES - 1, COLUMNS, LANES, VECTOR, "evict_first")
    for number in tl.static_range(RESIDENT):
        again = _unknown(resident[number], nothing, HAS_PTX)
        _write(drow_V, number, again, about, factor, COLUMNS, LANES, VECTOR)
    if RESIDENT < TILES:
        for done in range(TILES - RESIDENT - 1):
            last = TILES - 1 - done
            following = _tile(row_V, last - 1, COLUMNS, LANES, VECTOR, "evict_first")
            _write(drow_V, last, x, about, factor, COLUMNS, LANES, VECTOR)
            x = following
        _write(drow_V, RESIDENT, x, about, factor, COLUMNS, LANES, VECTOR)


@triton.jit
def _unknown(x, nothing, HAS_PTX: tl.constexpr):
    """Return x in a form that the compiler does not recognise as x.

    Otherwise it would keep the exponentials, in twice as many registers, instead of recomputing.
    """
    if not HAS_PTX:
        return x
    nothings = tl.zeros_like(x.to(tl.int16, bitcast=True)) + nothing
    code: tl.constexpr = "xor.b32 $0, $1, $2;"
    return tl.inline_asm_elementwise(
        code, "=r,r,r", [x, nothings], dtype=x.dtype, is_pure=True, pack=2
    )


@triton.jit
def _write(
    drow_V,
    number,
    x,
    about,
    factor,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    first, columns = number * (LANES * VECTOR), tile_columns(LANES, VECTOR, True)
    dx = tl.exp2((x.to(tl.float32) - about) * LOG2_E) * factor
    dx = dx.to(drow_V.dtype.element_ty)
    tl.store(drow_V + first + columns, dx, columns < COLUMNS - first, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["num_rows"])
def reduced_kernel(losses_M, state_M21, loss_1, num_rows, BLOCK: tl.constexpr):
    """Write the sum of the losses, divided by the divisor."""
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, num_rows, BLOCK):
        rows = tl.arange(0, BLOCK) + first
        sums += tl.load(losses_M + rows, rows < num_rows, other=0.0)
    tl.store(loss_1, tl.sum(sums, axis=0) / tl.load(state_M21 + 2 * num_rows))


@triton.jit(do_not_specialize=["num_programs"])
def scaled_kernel(
    x_N,
    factor_1,
    y_N,
    num_elements: tl.int64,
    num_programs,
    IS_IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write x times the factor; in place, a factor of 1 is a no-op."""
    factor = tl.load(factor_1).to(tl.float32)
    if not IS_IN_PLACE or factor != 1.0:
        step = num_programs.to(tl.int64) * BLOCK
        first = tl.program_id(0).to(tl.int64) * BLOCK
        while first < num_elements:
            elements = first + tl.arange(0, BLOCK)
            x = tl.load(x_N + elements, elements < num_elements, other=0.0)
            y = (x.to(tl.float32) * factor).to(x.dtype)
            tl.store(y_N + elements, y, elements < num_elements)
            first += step


_launch_losses = Launcher(losses_kernel)
_launch_losses_resident = Launcher(losses_resident_kernel)
_launch_gradients = Launcher(gradients_kernel)
_launch_merge = Launcher(merge_kernel)
_launch_reduced = Launcher(reduced_kernel)
_launch_scaled = Launcher(scaled_kernel)
_operator_scaled = define(
    "scaled(Tensor x, Tensor factor) -> Tensor",
    _run_scaled,
    lambda x, factor: torch.empty(x.shape, dtype=x.dtype, device=x.device),
)
_operator_scale = define(
    "scale_(Tensor(a!) x, Tensor factor) -> ()", _run_scale, lambda x, factor: None
)
