"""Cross-entropy as operators of torch: the loss alone, loss and gradient, the gradient later.

Those with a trailing underscore write the gradient over the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kprof.kernels._cross_entropy import Options, write_gradients, write_losses
from kprof.kernels._cross_entropy_groups import write_losses_shared
from kprof.kernels._operator import define
from kprof.kernels._scaling import write_reduced


def has_side_by_side_columns(logits: Tensor) -> bool:
    """Tell whether a row can be read, and written, as it lies."""
    return logits.stride(-1) == 1


def _as_rows(logits: Tensor) -> Tensor:
    return logits if has_side_by_side_columns(logits) else logits.contiguous()


def _empty_results(logits: Tensor, reduction: str) -> tuple[Tensor, Tensor]:
    """Return places for the loss, and for what the rows leave behind."""
    num_rows = logits.shape[0]
    shape = (num_rows,) if reduction == "none" else ()
    loss = torch.empty(shape, dtype=torch.float32, device=logits.device)
    return loss, torch.empty(2 * num_rows + 1, dtype=torch.float32, device=logits.device)


def _run(
    logits: Tensor,
    targets: Tensor,
    divisor: Tensor | None,
    options: Options,
    dlogits: Tensor | None,
    write: Callable[..., None] = write_losses,
) -> tuple[Tensor, Tensor]:
    """Write the gradient, if there is a place; return the loss, and what the rows left behind."""
    loss, state = _empty_results(logits, options.reduction)
    if not logits.shape[0]:
        return loss.fill_(math.nan if options.reduction == "mean" else 0.0), state
    losses = loss
    if options.reduction != "none":
        losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    write(logits, targets.contiguous(), divisor, options, losses, state, dlogits)
    if options.reduction != "none":
        write_reduced(losses, state, loss)
    return loss, state


def _run_loss(
    logits: Tensor, targets: Tensor, divisor: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    return _run(_as_rows(logits), targets, divisor, Options(*options), None)


def _run_both(
    write: Callable[..., None],
    logits: Tensor,
    targets: Tensor,
    divisor: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    gradient = _empty_gradient(logits)
    loss, _ = _run(_as_rows(logits), targets, divisor, Options(*options), gradient, write)
    return loss, gradient


def _run_both_over(
    write: Callable[..., None],
    logits: Tensor,
    targets: Tensor,
    divisor: Tensor | None,
    *options: Any,
) -> Tensor:
    return _run(logits, targets, divisor, Options(*options), logits, write)[0]


def _run_gradient(
    dloss: Tensor, logits: Tensor, targets: Tensor, state: Tensor, *options: Any
) -> Tensor:
    gradient = _empty_gradient(logits)
    if logits.shape[0]:
        rows, targets = _as_rows(logits), targets.contiguous()
        write_gradients(dloss, rows, targets, Options(*options), state, gradient)
    return gradient


def _run_gradient_over(
    dloss: Tensor, logits: Tensor, targets: Tensor, state: Tensor, *options: Any
) -> None:
    if logits.shape[0]:
        write_gradients(dloss, logits, targets.contiguous(), Options(*options), state, logits)


def _empty_gradient(logits: Tensor) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


_OPTIONS = "int ignore_index, float label_smoothing, float z_loss, str reduction"
_INPUTS = f"Tensor targets, Tensor? divisor, {_OPTIONS}"
operator_loss = define(
    f"cross_entropy(Tensor logits, {_INPUTS}) -> (Tensor, Tensor)",
    _run_loss,
    lambda logits, targets, divisor, *options: _empty_results(logits, options[-1]),
)


def _define_both(name: str, write: Callable[..., None]) -> tuple[Callable[..., Any], ...]:
    """Define loss and gradient in one pass; the gradient apart, and over the logits."""
    apart = define(
        f"{name}(Tensor logits, {_INPUTS}) -> (Tensor, Tensor)",
        partial(_run_both, write),
        lambda logits, targets, divisor, *options: (
            _empty_results(logits, options[-1])[0],
            _empty_gradient(logits),
        ),
    )
    over = define(
        f"{name}_(Tensor(a!) logits, {_INPUTS}) -> Tensor",
        partial(_run_both_over, write),
        lambda logits, targets, divisor, *options: _empty_results(logits, options[-1])[0],
    )
    return apart, over


operator_both, operator_both_over = _define_both("cross_entropy_with_gradient", write_losses)
operator_both_shared, operator_both_shared_over = _define_both(
    "cross_entropy_with_gradient_shared", write_losses_shared
)
_BACKWARD_INPUTS = f"Tensor targets, Tensor state, {_OPTIONS}"
operator_gradient = define(
    f"cross_entropy_backward(Tensor dloss, Tensor logits, {_BACKWARD_INPUTS}) -> Tensor",
    _run_gradient,
    lambda dloss, logits, *others: _empty_gradient(logits),
)
operator_gradient_over = define(
    f"cross_entropy_backward_(Tensor dloss, Tensor(a!) logits, {_BACKWARD_INPUTS}) -> ()",
    _run_gradient_over,
    lambda *inputs: None,
)
