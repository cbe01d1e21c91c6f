"""Tensors as rows of columns that lie side by side, and how many threads walk over them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kprof.kernels.runtime.launcher import next_power_of_two

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Loads of 16 bytes, two for each thread: as much as leaves a thread's other values in registers.
ELEMENTS_PER_WARP = 512
MOST_WARPS = 32
SMS_WITHOUT_GPU = 4


def rows_of(x: Tensor) -> tuple[Tensor, int]:
    """Return a tensor that begins with the first row, and the elements from one row to the next.

    It is a copy only where columns are not side by side, or rows not evenly apart.
    """
    if x.is_contiguous():
        return x, x.shape[-1]
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    return rows, rows.stride(0)


def count_rows(x: Tensor) -> int:
    """Return the number of rows; 0 where they have no columns, and there is nothing to do."""
    return x.numel() // x.shape[-1] if x.shape[-1] else 0


def empty_like(x: Tensor) -> Tensor:
    """Return a contiguous tensor of the same shape and dtype; `torch.empty` takes twice as long."""
    # What like it is anyway need not be asked for, which takes time, too.
    if x.is_contiguous():
        return torch.empty_like(x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@functools.cache
def tile_of(columns: int, elements: int) -> tuple[int, int, int]:
    """Return the rows of a program of so many elements, the columns that it sees, and its warps.

    It depends on the columns alone: a row's sum has the same order whatever stands around it.
    """
    block = next_power_of_two(columns)
    rows = max(1, elements // block)
    return rows, block, min(MOST_WARPS, max(1, rows * block // ELEMENTS_PER_WARP))


def is_widened(x: Tensor) -> bool:
    """Tell whether autocast is on, under which torch takes norms and softmax of x in float32."""
    return x.dtype != torch.float32 and torch.is_autocast_enabled(x.device.type)


@functools.cache
def num_sms(device: torch.device) -> int:
    """Return the number of multiprocessors; a few where there is no GPU."""
    if device.type != "cuda":
        return SMS_WITHOUT_GPU
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
