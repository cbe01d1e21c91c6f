"""One pass of a kernel as work that can be timed and captured: forward, backward, or both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any, Literal

import torch

from kprof.kernels import Kernel

# Training: a forward and a backward pass, with all gradients.
Pass = Literal["forward", "backward", "training"]


def pass_of(
    kernel: Kernel, function: Callable[..., Any], sets: list[tuple[Any, ...]], direction: Pass
) -> Callable[[], None]:
    """Return what runs one pass of the kernel on one of the sets of arguments after the other."""
    make = {"forward": _forward, "backward": _backward, "training": _training}[direction]
    return make(kernel, function, sets)


def _forward(
    kernel: Kernel, function: Callable[..., Any], sets: list[tuple[Any, ...]]
) -> Callable[[], None]:
    turns = cycle(sets)

    def run() -> None:
        with torch.no_grad():
            function(*next(turns))

    return run


def _backward(
    kernel: Kernel, function: Callable[..., Any], sets: list[tuple[Any, ...]]
) -> Callable[[], None]:
    """Return the backward pass alone; the forward passes run once, when it is first called.

    Autograd launches on the stream of the forward pass, so that has to be the caller's.
    """
    done: dict[int, Iterator[Any]] = {}

    def run() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        if stream not in done:
            done.clear()
            done[stream] = cycle([_with_graph(kernel, function, one) for one in sets])
        outputs, inputs, gradients = next(done[stream])
        torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)

    return run


def _training(
    kernel: Kernel, function: Callable[..., Any], sets: list[tuple[Any, ...]]
) -> Callable[[], None]:
    turns = cycle(sets)
    gradients: list[Any] = []

    def run() -> None:
        outputs, inputs, drawn = _with_graph(kernel, function, next(turns), gradients)
        torch.autograd.grad(outputs, inputs, drawn)

    return run


def _with_graph(
    kernel: Kernel,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    kept: list[Any] | None = None,
) -> tuple[Any, tuple[Any, ...], Any]:
    """Return results of a forward pass, what gets gradients, and gradients of the results.

    Those gradients are drawn once and `kept`; of a loss, one number, they are 1.
    """
    inputs = tuple(arguments[i].requires_grad_() for i in kernel.differentiable)
    output = function(*arguments)
    outputs = output if isinstance(output, tuple) else (output,)
    outputs = tuple(one for one in outputs if one.requires_grad)
    gradients = kept if kept is not None else []
    if not gradients:
        drawn = (torch.randn_like(one) if one.dim() else torch.ones_like(one) for one in outputs)
        gradients.extend(drawn)
    return outputs, inputs, tuple(gradients)
