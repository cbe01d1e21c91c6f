"""Small things around a loss: its reduction, and a gradient times what arrives."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kprof.kernels.runtime import Launcher, alignments, define, kind_of

# As many as most calls have, so that a program waits for memory once.
ELEMENTS_PER_SUM = 8_192
ELEMENTS_PER_PROGRAM = 4_096
# Enough to be fast, and few where there is nothing to do.
MOST_PROGRAMS = 1_056


@triton.jit(do_not_specialize=["num_rows"])
def reduced_kernel(losses_M, state_M21, loss_1, num_rows, BLOCK: tl.constexpr):
    """Write the sum of the losses over the divisor."""
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
    """Write x times the factor; in place and times one, there is nothing to do."""
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


_launch_reduced = Launcher(reduced_kernel)
_launch_scaled = Launcher(scaled_kernel)


def write_reduced(losses: Tensor, state: Tensor, loss: Tensor) -> None:
    """Write the sum of the losses over the divisor that is in `state`."""
    tensors = (losses, state, loss)
    call = kind_of(*tensors)
    if _launch_reduced.again(call, tensors):
        return
    key = losses.device, alignments(tensors)
    arguments = (*tensors, losses.shape[0], ELEMENTS_PER_SUM)
    _launch_reduced(key, 1, arguments, {"num_warps": 16}, call=call, tensors=tensors)


def scale_once(gradient: Tensor, dloss: Tensor) -> Tensor:
    """Return the gradient times what arrives: itself, unless it may be asked for again."""
    if torch.compiler.is_compiling() or is_graph_kept():
        return _operator_scaled(gradient, dloss)
    _operator_scale(gradient, dloss)
    return gradient


def is_graph_kept() -> bool:
    """Tell whether the running backward pass may be run again, so that what it saved must stay."""
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
    """Write x times one factor into y, which may be x: times one, that takes no time then."""
    tensors, is_in_place = (x, factor, y), x is y
    call = kind_of(*tensors), is_in_place
    size = x.numel()
    if _launch_scaled.again(call, tensors) or not size:
        return
    programs = min(-(-size // ELEMENTS_PER_PROGRAM), MOST_PROGRAMS)
    kind = size % 16 == 0, size == 1
    key = x.device, x.dtype, factor.dtype, is_in_place, kind, alignments(tensors)
    arguments = (*tensors, size, programs, is_in_place, ELEMENTS_PER_PROGRAM)
    options = {"num_warps": 8}
    _launch_scaled(key, programs, arguments, options, call=call, tensors=tensors)


_operator_scaled = define(
    "scaled(Tensor x, Tensor factor) -> Tensor",
    _run_scaled,
    lambda x, factor: torch.empty(x.shape, dtype=x.dtype, device=x.device),
)
_operator_scale = define(
    "scale_(Tensor(a!) x, Tensor factor) -> ()", _run_scale, lambda x, factor: None
)
