"""Casts of float32 weights to 16 bits for autocast: many tensors in few launches.

Torch's autocast casts each weight where a layer uses it, and its backward casts each gradient to
float32: two launches for each tensor, most of them of a few microseconds. `cast_weights` casts all
of them at once, with the same bits, and so does its backward with their gradients, when the last
one is there. Each pass reads 4 or 2 bytes of an element and writes 2 or 4.

The multi-tensor copy is torch's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kprof.kernels import OURS, Kernel, Provider, Work
from kprof.kernels.runtime import applied

NARROW = (torch.bfloat16, torch.float16)


def cast_weights(*weights: Tensor, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """Return copies of float32 weights.

    Args:
        weights: Of any shapes, on one device.
        dtype: Of the copies: bfloat16 or float16.
    """
    if torch.is_grad_enabled() and any(one.requires_grad for one in weights):
        copies: tuple[Tensor, ...] = _with_gradients(dtype, None, *weights)
        return copies
    return tuple(_cast(weights, dtype))


def _reference(*weights: Tensor, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """Compute what autocast does."""
    return tuple(one.to(dtype) for one in weights)


def _truth(up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> tuple[Tensor, ...]:
    return tuple(one.clone() for one in (up, up_bias, down, down_bias))


class _WithGradients(torch.autograd.Function):
    """The casts, whose gradients are cast back at once."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, done: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.done = done
        return tuple(_cast(weights, dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.done is not None:
            ctx.done()
        given = [one for one in gradients if one is not None]
        wide = iter(_cast(given, torch.float32))
        return (None, None, *(None if one is None else next(wide) for one in gradients))


def _cast(tensors: Any, dtype: torch.dtype) -> list[Tensor]:
    """Return copies in another dtype, in the same layouts."""
    given = list(tensors)
    copies = [torch.empty_like(one, dtype=dtype) for one in given]
    if copies:
        torch._foreach_copy_(copies, given)
    return copies


_with_gradients = applied(_WithGradients)


def cast_until(done: Any, *weights: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return copies of weights that get gradients; `done` is called when their backward begins."""
    copies: tuple[Tensor, ...] = _with_gradients(dtype, done, *weights)
    return copies


def _refuses(*weights: Tensor) -> str | None:
    for one in weights:
        if one.dtype != torch.float32:
            return f"a weight is {one.dtype}, not float32"
    return None


def _work(of_element: int, *weights: Tensor) -> Work:
    return Work(0, of_element * sum(one.numel() for one in weights))


KERNEL = Kernel(
    name="cast_weights",
    replaces="the casts of float32 weights, and of their gradients, under autocast",
    reference=_reference,
    truth=_truth,
    providers=(
        Provider(OURS, lambda: cast_weights, "kprof"),
        Provider("eager", lambda: _reference),
        Provider("inductor", lambda: torch.compile(_reference, dynamic=False)),
    ),
    refuses=_refuses,
    # Two layers with biases, as in an MLP.
    inputs=lambda shape, draw: (
        *(draw(*shape), draw.plain(shape[0])),
        *(draw(*shape[::-1]), draw.plain(shape[1])),
    ),
    work=lambda *weights: _work(6, *weights),
    shapes=((3_072, 768), (4_096, 1_024)),
    edges=((5, 127), (3, 4_097)),
    free=(0, 1),
    dtypes=("float32",),
    differentiable=(0, 1, 2, 3),
    backward_work=lambda *weights: _work(6, *weights),
    sources=("torch, autocast_mode.cpp: which weights it casts, and when",),
)
