"""Launching cross-entropy where several SMs share a row: where that can be, and how many do.

Programs of a group wait for one another, so all of them have to run at once: the launch is a
cooperative one, which begins when there is room for all, one on an SM.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from kprof.kernels.cross_entropy._sweeps import Options, write_losses
from kprof.kernels.runtime import IS_INTERPRETED, Launcher, alignments, next_power_of_two, num_sms

HOPPER = 9
DTYPES = (torch.bfloat16, torch.float16)
WARPS = 32
LANES = 32 * WARPS
# All that so many threads can have; else the assembler may make do with half, for a second program.
REGISTERS = 65_536 // LANES
# What a thread loads at once, and how often it does so for one row at most: two rows, and the
# gradient of one, then take 192 of the 227 KB that a program may have.
VECTOR, MOST_TILES = 8, 4
# Columns of a row of a box, in which gradients are copied: 128 bytes.
WIDTH = 64


def why_not_here() -> str:
    """Return why rows cannot be shared here; empty: they can, or may at least be compiled for."""
    if IS_INTERPRETED:
        return "Gluon has no interpreter"
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != HOPPER:
        return "written for Hopper"
    return ""


def programs_of_row(num_columns: int) -> int:
    """Return how many programs share a row: as few as have room for it."""
    return -(-num_columns // (LANES * VECTOR * MOST_TILES))


def write_losses_shared(
    logits: Tensor,
    targets: Tensor,
    divisor: Tensor | None,
    options: Options,
    losses: Tensor,
    state: Tensor,
    dlogits: Tensor | None,
) -> None:
    """Do what `write_losses` does; only with a gradient, without smoothing, of aligned rows.

    All else goes to `write_losses`.
    """
    if dlogits is None or not _can_share(logits, dlogits, options):
        write_losses(logits, targets, divisor, options, losses, state, dlogits)
        return
    num_rows, num_columns = logits.shape
    group = programs_of_row(num_columns)
    groups = min(num_rows, max(1, num_sms(logits.device) // group))
    # What programs tell each other, one word each for a row; zeros are none.
    letters = None
    if group > 1:
        letters = torch.zeros(num_rows * group, dtype=torch.int64, device=logits.device)
    # A piece in a power of two of boxes.
    boxes = next_power_of_two(-(-num_columns // (group * LANES * VECTOR)))
    described = _describe(logits, group, boxes), _describe(dlogits, group, 1)
    tensors = (logits, targets, divisor, losses, state, dlogits, letters, *described)
    strides = logits.stride(0), dlogits.stride(0)
    constants = options.reduction == "mean", num_columns, group
    types = logits.device, logits.dtype, None if divisor is None else divisor.dtype
    key = types, *strides, constants, alignments((targets, divisor, losses, state))
    chosen = options.ignore_index, options.z_loss
    arguments = (*tensors, *strides, num_rows, groups, *chosen, *constants)
    how = {"num_warps": WARPS, "launch_cooperative_grid": True, "maxnreg": REGISTERS}
    _launcher()(key, groups * group, arguments, how)


def _can_share(logits: Tensor, dlogits: Tensor, options: Options) -> bool:
    """Tell whether rows are of whole boxes, and aligned, and all programs of a row can run."""
    num_columns = logits.shape[1]
    steps = num_columns, logits.stride(0), dlogits.stride(0)
    is_aligned = alignments((logits, dlogits), *steps) == 0 and num_columns % WIDTH == 0
    is_here = logits.device.type == "cuda"
    has_room = not is_here or programs_of_row(num_columns) <= num_sms(logits.device)
    return is_aligned and has_room and not options.smoothing and logits.dtype in DTYPES


def _describe(rows: Tensor, group: int, boxes: int) -> Any:
    """Return what the copying hardware is told of rows: so many boxes at a time.

    Nothing beyond a piece is copied where all pieces are alike.
    """
    from kprof.kernels.tiles.gluon import TensorDescriptor, gl

    num_rows, num_columns = rows.shape
    dtype = gl.bfloat16 if rows.dtype == torch.bfloat16 else gl.float16
    box = [1, 1, boxes * LANES * VECTOR // WIDTH, WIDTH]
    layout = gl.NVMMASharedLayout.get_default_for(box, dtype)
    pieces = group if num_columns % (group * WIDTH) == 0 else 1
    shape = [num_rows, pieces, num_columns // (pieces * WIDTH), WIDTH]
    strides = [rows.stride(0), num_columns // pieces, WIDTH, 1]
    return TensorDescriptor(rows, shape, strides, box, layout)


@cache
def _launcher() -> Launcher:
    from kprof.kernels.cross_entropy._clusters_kernel import losses_shared_kernel

    return Launcher(losses_shared_kernel)
