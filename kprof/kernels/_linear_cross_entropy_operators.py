"""A linear layer and its cross-entropy as operators of torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kprof.kernels._cross_entropy import Options
from kprof.kernels._linear_cross_entropy import (
    Gradients,
    find_gradients_by_pieces,
    find_losses_by_pieces,
    run_by_rows,
)
from kprof.kernels._operator import define


def _run_by_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    divisor: Tensor | None,
    wanted: tuple[bool, bool, bool],
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return run_by_rows(hidden, weight, bias, targets, divisor, Options(*options), wanted)


def _run_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    divisor: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    return find_losses_by_pieces(hidden, weight, bias, targets, divisor, Options(*options))


def _run_gradients(
    dloss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    state: Tensor,
    wanted: tuple[bool, bool, bool],
    *options: Any,
) -> Gradients:
    return find_gradients_by_pieces(
        dloss, hidden, weight, bias, targets, state, Options(*options), wanted
    )


def _empty_loss(hidden: Tensor, reduction: str) -> Tensor:
    shape = (hidden.shape[0],) if reduction == "none" else ()
    return torch.empty(shape, dtype=torch.float32, device=hidden.device)


def _empty_gradients(hidden: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]) -> Gradients:
    return (
        torch.empty_like(hidden) if wanted[0] else hidden.new_empty(0),
        torch.empty_like(weight) if wanted[1] else weight.new_empty(0),
        weight.new_empty(weight.shape[0] if wanted[2] else 0),
    )


_INPUTS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor targets"
_OPTIONS = "int ignore_index, float label_smoothing, float z_loss, str reduction"
operator_by_rows = define(
    f"linear_cross_entropy_with_gradients({_INPUTS}, Tensor? divisor, bool[3] wanted, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _run_by_rows,
    lambda hidden, weight, bias, targets, divisor, wanted, *options: (
        _empty_loss(hidden, options[-1]),
        *_empty_gradients(hidden, weight, wanted),
    ),
)
operator_loss = define(
    f"linear_cross_entropy({_INPUTS}, Tensor? divisor, {_OPTIONS}) -> (Tensor, Tensor)",
    _run_loss,
    lambda hidden, weight, bias, targets, divisor, *options: (
        _empty_loss(hidden, options[-1]),
        hidden.new_empty(2 * hidden.shape[0] + 1, dtype=torch.float32),
    ),
)
operator_gradients = define(
    f"linear_cross_entropy_backward(Tensor dloss, {_INPUTS}, Tensor state, bool[3] wanted,"
    f" {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _run_gradients,
    lambda dloss, hidden, weight, bias, targets, state, wanted, *options: _empty_gradients(
        hidden, weight, wanted
    ),
)
