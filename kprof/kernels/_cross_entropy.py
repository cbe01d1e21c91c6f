"""Launching the kernels of cross-entropy: how rows are swept, and how many at a time."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kprof.kernels._cross_entropy_device import gradients_kernel, losses_kernel, merge_kernel
from kprof.kernels._cross_entropy_held import losses_held_kernel
from kprof.kernels._launch import (
    IS_INTERPRETED,
    Launcher,
    alignments,
    kind_of,
    next_power_of_two,
)

VECTOR_BYTES = 16
VECTORS_PER_THREAD = 4
WARPS_PER_SM = 32
MOST_ROWS_PER_SM = 16
# Of the L2 cache, for rows between their two sweeps; the rest is for what is written.
SHARE_OF_L2 = 0.6
# Two rows that are held keep an SM busy, of so many tiles that it is worth the while. A thread has
# 64 registers then: the four of each tile fit them eight times, or six where others are read, too.
WARPS_HELD, ROWS_HELD, LEAST_TILES_HELD = 16, 2, 4
MOST_TILES_HELD, TILES_HELD_OF_MORE, REGISTERS_HELD = 8, 6, 64
# A sum about something else than the maximum has fewer digits, of which float32 would show.
DTYPES_HELD = (torch.bfloat16, torch.float16)
# Neither the interpreter nor another maker's GPU knows instructions, or counts registers, by name.
HAS_PTX = not IS_INTERPRETED and torch.version.hip is None
# Where there is no GPU: what an H200 has.
SMS_WITHOUT_GPU = 132
L2_BYTES_WITHOUT_GPU = 60 * 2**20


class Options(NamedTuple):
    """What decides the loss beside logits and targets."""

    ignore_index: int
    smoothing: float
    z_loss: float
    reduction: str


class _Plan(NamedTuple):
    num_warps: int
    rows_at_once: int
    """In all, over the GPU."""
    tile: tuple[int, int, bool]
    """Lanes, elements of a lane, and whether they lie side by side."""


_Kind = tuple[Hashable, ...]

_launch_losses = Launcher(losses_kernel)
_launch_losses_held = Launcher(losses_held_kernel)
_launch_gradients = Launcher(gradients_kernel)
_launch_merge = Launcher(merge_kernel)


def write_losses(
    logits: Tensor,
    targets: Tensor,
    divisor: Tensor | None,
    options: Options,
    losses: Tensor,
    state: Tensor,
    dlogits: Tensor | None,
) -> None:
    """Write each row's loss, and if `dlogits` is given (it may be `logits`) its gradient.

    Args:
        logits: (M, V), the columns side by side.
        targets: (M,), contiguous int64.
        divisor: One float32, of sum and gradient; without it a mean counts the targets.
        options: See there.
        losses: (M,) float32.
        state: (2 M + 1,) float32; gets maxima, sums and the divisor.
        dlogits: (M, V), the columns side by side.
    """
    tensors = (logits, targets, divisor, losses, state, dlogits)
    call = kind_of(*tensors), options
    if _launch_losses.again(call, tensors) or _launch_losses_held.again(call, tensors):
        return
    num_rows, num_columns = logits.shape
    kind = _kind_of(logits, logits if dlogits is None else dlogits)
    is_mean, is_smoothed = options.reduction == "mean", options.smoothing != 0
    held = None if is_smoothed else _plan_held(*kind)
    plan = held or _plan(*kind)
    programs = min(num_rows, plan.rows_at_once)
    types = targets.dtype, None if divisor is None else divisor.dtype, dlogits is None
    alignment = alignments((targets, divisor, losses, state))
    key = kind, types, is_mean, is_smoothed, alignment
    strides = logits.stride(0), logits.stride(0) if dlogits is None else dlogits.stride(0)
    warps: dict[str, int] = {"num_warps": plan.num_warps}
    known: dict[str, Any] = {"call": call, "tensors": tensors}
    if held:
        numbers = (num_rows, programs, options.ignore_index, options.z_loss)
        lanes, vector, _ = plan.tile
        num_tiles = -(-num_columns // (lanes * vector))
        num_held = num_tiles if num_tiles <= MOST_TILES_HELD else TILES_HELD_OF_MORE
        tile = num_held, lanes, vector
        constants: tuple[Any, ...] = (is_mean, num_columns, *tile, HAS_PTX)
        arguments = (*tensors, *strides, *numbers, *constants)
        if HAS_PTX:
            warps["maxnreg"] = REGISTERS_HELD
        _launch_losses_held(key, programs, arguments, warps, **known)
        return
    sizes = (num_rows, num_columns, programs, options.ignore_index)
    constants = (options.smoothing, options.z_loss, is_mean, is_smoothed, *plan.tile)
    _launch_losses(key, programs, (*tensors, *strides, *sizes, *constants), warps, **known)


def write_gradients(
    dloss: Tensor,
    logits: Tensor,
    targets: Tensor,
    options: Options,
    state: Tensor,
    dlogits: Tensor,
    piece: tuple[int, int] | None = None,
) -> None:
    """Write the gradient of each row into `dlogits`, which may be `logits`.

    Args:
        dloss: One element, or one a row where nothing is reduced.
        logits: (M, V), the columns side by side.
        targets: (M,), contiguous int64.
        options: See there.
        state: (2 M + 1,): maxima, sums and the divisor.
        dlogits: (M, V), the columns side by side.
        piece: Of which column of the vocabulary the first one is, and how large that is.
    """
    num_rows, num_columns = logits.shape
    kind = _kind_of(logits, dlogits)
    plan = _plan(*kind)
    programs = min(num_rows, plan.rows_at_once)
    key = kind, dloss.dtype, alignments((dloss, targets, state))
    arguments = (
        *(dloss, logits, targets, state, dlogits, dloss.stride(0) if dloss.dim() else 0),
        *(logits.stride(0), dlogits.stride(0), num_rows, num_columns, programs),
        *(options.ignore_index, *(piece or (0, num_columns))),
        *(options.smoothing, options.z_loss, *plan.tile),
    )
    _launch_gradients(key, programs, arguments, {"num_warps": plan.num_warps})


def merge_piece(
    logits: Tensor, targets: Tensor, state: Tensor, first_column: int, is_smoothed: bool
) -> None:
    """Add the logits of a piece of the vocabulary to what `state` knows of each row.

    Args:
        logits: (M, columns of the piece), side by side.
        targets: (M,), contiguous int64.
        state: (4, M): maxima, sums of exponentials about them, targets' logits and plain sums.
        first_column: Where the piece begins.
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
    """Return all of the two matrices that a binary and a plan depend on."""
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
    """Return how rows are swept; no number of rows has a say in that."""
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
def _plan_held(
    device: torch.device,
    dtype: torch.dtype,
    num_columns: int,
    stride: int,
    dstride: int,
    alignment: Hashable,
) -> _Plan | None:
    """Return how rows are held and summed without a maximum; None where that is not faster."""
    lanes, vector = 32 * WARPS_HELD, VECTOR_BYTES // dtype.itemsize
    is_fit = _rows_per_sm(device, dtype, num_columns) >= ROWS_HELD
    is_long = num_columns >= LEAST_TILES_HELD * lanes * vector
    is_even = _is_even(dtype, num_columns, stride, dstride, alignment)
    if is_fit and is_long and is_even and dtype in DTYPES_HELD:
        return _Plan(WARPS_HELD, ROWS_HELD * _limits(device)[0], (lanes, vector, True))
    return None


def _rows_per_sm(device: torch.device, dtype: torch.dtype, num_columns: int) -> int:
    """Return how many rows every SM can have in the L2 cache."""
    num_sms, l2_bytes = _limits(device)
    return int(SHARE_OF_L2 * l2_bytes / (num_columns * dtype.itemsize * num_sms))


def _is_even(
    dtype: torch.dtype, num_columns: int, stride: int, dstride: int, alignment: Hashable
) -> bool:
    """Tell whether all vectors of all rows are aligned."""
    vector = VECTOR_BYTES // dtype.itemsize
    return alignment == 0 and not any(n % vector for n in (num_columns, stride, dstride))


@cache
def _limits(device: torch.device) -> tuple[int, int]:
    """Return the number of SMs, and the bytes of the L2 cache."""
    if device.type != "cuda":
        return SMS_WITHOUT_GPU, L2_BYTES_WITHOUT_GPU
    properties = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count), int(properties.L2_cache_size)
