"""One launch over many tensors: their addresses in a table on the device, cut into chunks.

T is tensors, C chunks. A program reads which part of which tensor is its own, so that the number
of tensors costs nothing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from kprof.kernels._adamw_device import step_kernel, update_kernel
from kprof.kernels._launch import ALIGNMENT, Launcher, alignments

# One step for each program: its neighbours in time are then its neighbours in memory.
CHUNK = 4_096
NUM_WARPS = 8
TENSORS_PER_PROGRAM = 64
# Bits of the largest step that float32 counts exactly.
STEP_BITS = 24
PARAM, GRADIENT, AVERAGE, SQUARE, STEP, LENGTH = range(6)
NUM_FIELDS = 6
TABLES_KEPT = 32

TRITON_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
# What a graph copies from the host when it is replayed has to stay there.
_captured: list[Tensor] = []


class Numbers(NamedTuple):
    """The hyperparameters of a group."""

    lr: float | Tensor
    beta1: float
    beta2: float
    weight_decay: float
    eps: float
    maximize: bool


class Table(NamedTuple):
    """Where the tensors are, and which parts of them the programs have."""

    tensors_T6: Tensor
    """Addresses of parameter, gradient, average, square and step; number of elements."""
    corrections_T2: Tensor
    """Both bias corrections in float64, as of the running step."""
    chunks_C: Tensor
    """Number of the tensor times 2^32, plus that of the chunk in it."""
    is_aligned: bool


_launch_step = Launcher(step_kernel)
_launch_update = Launcher(update_kernel)


def launch(
    tensors: list[list[Tensor]],
    numbers: Numbers,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Update all parameters, which share a device and dtypes, each dense and laid out alike.

    Args:
        tensors: Parameters, gradients, averages, squares and steps; steps on the device, or on
            the host, where they are counted, too.
        numbers: Hyperparameters.
        grad_scale: What the gradients are divided by first.
        found_inf: One where nothing may be updated.
    """
    params, gradients, averages, _, steps = tensors
    table = _table_of(tensors)
    device = params[0].device
    has_found_inf = found_inf is not None
    if steps[0].device == device:
        grid = -(-len(params) // TENSORS_PER_PROGRAM)
        arguments: tuple[Any, ...] = (
            *(table.tensors_T6, table.corrections_T2, found_inf, numbers.beta1, numbers.beta2),
            *(len(params), STEP_BITS, NUM_FIELDS, TENSORS_PER_PROGRAM),
        )
        _launch_step((device, has_found_inf), grid, arguments, {"num_warps": 2})
    else:
        _correct_on_host(steps, numbers, table)
    lr = numbers.lr if isinstance(numbers.lr, Tensor) else None
    dtypes = tuple(TRITON_TYPES[one[0].dtype] for one in (params, gradients, averages))
    alignment = ALIGNMENT if table.is_aligned else 1
    key = (
        *(device, dtypes, alignment, numbers.maximize),
        *(lr is None or lr.dtype, grad_scale is None, has_found_inf),
        alignments(
            (
                lr,
                grad_scale,
                found_inf,
            )
        ),
    )
    arguments = (
        *(*table[:3], lr, grad_scale, found_inf, 0.0 if lr is not None else numbers.lr),
        *(numbers.beta1, numbers.beta2, numbers.weight_decay, numbers.eps, numbers.maximize),
        *(*dtypes, alignment, NUM_FIELDS, CHUNK),
    )
    _launch_update(key, table.chunks_C.numel(), arguments, {"num_warps": NUM_WARPS})


def _correct_on_host(steps: list[Tensor], numbers: Numbers, table: Table) -> None:
    """Count steps that live on the host, and send the corrections over without waiting."""
    torch._foreach_add_(steps, 1)
    counts = [float(step) for step in steps]
    rows = [[1 - numbers.beta1**n, (1 - numbers.beta2**n) ** 0.5] for n in counts]
    values = torch.tensor(rows, dtype=torch.float64, device="cpu")
    corrections = _send(values, table.corrections_T2.device)
    table.corrections_T2.copy_(corrections, non_blocking=True)


def _table_of(tensors: list[list[Tensor]]) -> Table:
    """Return the table of these tensors, made anew only where one of them has moved."""
    device = tensors[0][0].device
    is_on_device = tensors[STEP][0].device == device
    kept = tensors if is_on_device else tensors[:STEP]
    addresses = tuple(tuple(one.data_ptr() for one in group) for group in kept)
    lengths = tuple(one.numel() for one in tensors[0])
    if _is_captured(device):
        # While a graph is captured nothing is copied yet: nobody else may use such a table.
        return _make_table(device, addresses, lengths)
    return _keep_table(device, addresses, lengths)


def _make_table(
    device: torch.device, addresses: tuple[tuple[int, ...], ...], lengths: tuple[int, ...]
) -> Table:
    none = (0,) * len(lengths)
    fields = [*addresses, none, lengths] if len(addresses) == STEP else [*addresses, lengths]
    rows = torch.tensor(list(zip(*fields, strict=True)), dtype=torch.int64, device="cpu")
    make_chunks = _make_chunks if _is_captured(device) else _keep_chunks
    return Table(
        _send(rows, device),
        torch.empty(len(rows), 2, dtype=torch.float64, device=device),
        make_chunks(device, lengths, CHUNK),
        all(a % ALIGNMENT == 0 for group in addresses[:STEP] for a in group),
    )


def _make_chunks(device: torch.device, lengths: tuple[int, ...], chunk: int) -> Tensor:
    """Return the number of the tensor times 2^32, plus that of the chunk in it, of every chunk."""
    counts = torch.tensor([-(-length // chunk) for length in lengths], device="cpu")
    firsts = counts.cumsum(0) - counts
    tensors = torch.arange(len(lengths), device="cpu").repeat_interleave(counts)
    places = torch.arange(len(tensors), device="cpu") - firsts[tensors]
    return _send((tensors << 32) + places, device)


# Tensors that move, as gradients do, keep their lengths.
_keep_table = lru_cache(maxsize=TABLES_KEPT)(_make_table)
_keep_chunks = lru_cache(maxsize=TABLES_KEPT)(_make_chunks)


def _send(values: Tensor, device: torch.device) -> Tensor:
    """Return the host's values on the device, without waiting for it."""
    if device.type != "cuda":
        return values
    on_host = values.pin_memory()
    if _is_captured(device):
        _captured.append(on_host)
    return on_host.to(device, non_blocking=True)


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
