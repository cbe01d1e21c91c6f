"""Cross-entropy over a large vocabulary: loss and gradient with one read and one write.

In eager mode the gradient is made beside the loss, while the row is in the cache, and scaled later
only if the arriving gradient is not one. Where that could be wrong (float16 would underflow before
a gradient scaler acts), cannot be known (a gradient for every row), or cannot be seen (under
torch.compile), the logits are read again in the backward pass. Operators with a trailing underscore
write the gradient over the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from kprof.kernels import OURS, Kernel, Provider, Work
from kprof.kernels.cross_entropy._clusters import why_not_here, write_losses_shared
from kprof.kernels.cross_entropy._scaling import is_graph_kept, scale_once, write_reduced
from kprof.kernels.cross_entropy._sweeps import Options, write_gradients, write_losses
from kprof.kernels.runtime import applied, define


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

Reduction = Literal["mean", "sum", "none"]
IGNORE_INDEX = -100


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    *,
    z_loss: float = 0.0,
    divisor: Tensor | float | None = None,
    may_overwrite: bool = False,
    shares_rows: bool = False,
) -> Tensor:
    """Return the cross-entropy in float32, as of logits that were cast to it before.

    A target that is neither in the vocabulary nor `ignore_index` makes its loss NaN.

    Args:
        logits: (M, V); float32, float16 or bfloat16.
        targets: (M,) int64.
        ignore_index: A target that does not count, and whose row gets a gradient of zero.
        label_smoothing: The share of each target that is spread over the vocabulary.
        reduction: As in torch.
        z_loss: This times the squared logarithm of the sum of exponentials is added for each row.
        divisor: What to divide the sum by, such as the number of targets of all micro-batches:
            better here than afterwards, where it takes one more pass over the gradient.
        may_overwrite: Whether the logits may become their own gradient. Nobody may read them then.
        shares_rows: Whether several SMs of a Hopper GPU share a row, which each reads once, where
            loss and gradient are made together. Label smoothing, float32, and rows that are not
            multiples of 16 columns apart are swept as ever.
    """
    options = Options(ignore_index, float(label_smoothing), float(z_loss), reduction)
    if divisor is not None and not isinstance(divisor, Tensor):
        divisor = torch.full((), divisor, dtype=torch.float32, device=logits.device)
    if not (torch.is_grad_enabled() and logits.requires_grad):
        return operator_loss(logits, targets, divisor, *options)[0]
    is_known = reduction != "none" and logits.dtype != torch.float16
    if is_known and not torch.compiler.is_compiling():
        return _in_one_pass(logits, targets, divisor, options, may_overwrite, shares_rows)
    return _in_two_passes(logits, targets, divisor, options, may_overwrite)


class _InOnePass(torch.autograd.Function):
    """The gradient is made with the loss, for an arriving gradient of one."""

    @staticmethod
    def forward(
        ctx: Any, logits, targets, divisor, options, may_overwrite: bool, shares_rows: bool
    ) -> Tensor:
        if may_overwrite and has_side_by_side_columns(logits):
            over = operator_both_shared_over if shares_rows else operator_both_over
            loss, gradient = over(logits, targets, divisor, *options), logits
            torch.autograd.graph.increment_version(logits)
        else:
            both = operator_both_shared if shares_rows else operator_both
            loss, gradient = both(logits, targets, divisor, *options)
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return scale_once(gradient, dloss), None, None, None, None, None


class _InTwoPasses(torch.autograd.Function):
    """The gradient is made when it is known what it is multiplied by."""

    @staticmethod
    def forward(ctx: Any, logits, targets, divisor, options, may_overwrite: bool) -> Tensor:
        loss, state = operator_loss(logits, targets, divisor, *options)
        ctx.save_for_backward(logits, targets, state)
        ctx.options, ctx.may_overwrite = options, may_overwrite
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, state = ctx.saved_tensors
        arguments = dloss, logits, targets, state, *ctx.options
        is_last = not torch.compiler.is_compiling() and not is_graph_kept()
        if ctx.may_overwrite and is_last and has_side_by_side_columns(logits):
            operator_gradient_over(*arguments)
            torch.autograd.graph.increment_version(logits)
            return logits, None, None, None, None
        return operator_gradient(*arguments), None, None, None, None


_in_one_pass, _in_two_passes = applied(_InOnePass), applied(_InTwoPasses)


def _reference(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Do what the loss function of Hugging Face's language models does."""
    return functional.cross_entropy(
        logits.float(),
        targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )


def _truth(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    return functional.cross_entropy(
        logits,
        targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )


def _refuses(logits: Tensor, targets: Tensor, *options: Any, **more: Any) -> str | None:
    for tensor in (logits, targets):
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return f"a {type(tensor).__name__} is no plain tensor"
    if logits.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"{logits.dtype} is none of float32, float16 and bfloat16"
    if targets.dtype != torch.int64:
        return f"targets of {targets.dtype}: they have to be indices in int64"
    if logits.dim() != 2 or targets.shape != logits.shape[:1] or not logits.shape[1]:
        return f"logits of shape {tuple(logits.shape)} for targets of {tuple(targets.shape)}"
    return None


def _work(logits: Tensor, *others: Any) -> Work:
    """Count the logits read; 4 FLOPs an element."""
    return Work(4 * logits.numel(), logits.element_size() * logits.numel())


def _backward_work(logits: Tensor, *others: Any) -> Work:
    """Count the gradient written, beside logits that were read for the loss; 4 FLOPs an element."""
    return Work(4 * logits.numel(), logits.element_size() * logits.numel())


def _sharing() -> Any:
    why = why_not_here()
    if why:
        raise ImportError(why)
    return partial(cross_entropy, shares_rows=True)


def _inductor() -> Any:
    return torch.compile(_reference, dynamic=False)


def _liger() -> Any:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    # Arguments after the targets: class weights, index, z-loss, smoothing, reduction.
    return lambda logits, targets, index=IGNORE_INDEX, smoothing=0.0, reduction="mean": (
        LigerCrossEntropyFunction.apply(logits, targets, None, index, 0.0, smoothing, reduction)[0]
    )


def _quack() -> Any:
    from quack.cross_entropy import cross_entropy as quack_cross_entropy

    def run(
        logits: Tensor,
        targets: Tensor,
        index: int = IGNORE_INDEX,
        smoothing: float = 0.0,
        *rest: Any,
    ) -> Tensor:
        reduction = rest[0] if rest else "mean"
        return quack_cross_entropy(logits, targets, ignore_index=index, reduction=reduction)

    return run


KERNEL = Kernel(
    name="cross_entropy",
    replaces="torch.nn.functional.cross_entropy of logits cast to float32, as in Hugging Face",
    reference=_reference,
    truth=_truth,
    providers=(
        Provider(OURS, lambda: cross_entropy, "kprof"),
        Provider(f"{OURS}-shared", _sharing, "kprof"),
        Provider("eager", lambda: _reference),
        Provider("inductor", _inductor),
        Provider("liger", _liger, "liger-kernel"),
        Provider("quack", _quack, "quack-kernels"),
    ),
    refuses=_refuses,
    inputs=lambda shape, draw: (draw(*shape), draw.integers(shape[1], shape[0])),
    work=_work,
    shapes=((8_192, 128_256), (8_192, 32_000), (8_192, 151_936), (4_096, 262_144)),
    edges=((5, 144), (5, 127), (3, 8_209), (2, 32_000), (2, 98_288)),
    reach=(2**19,),
    differentiable=(0,),
    backward_work=_backward_work,
    sources=(
        "Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv 1805.02867",
        "transformers, ForCausalLMLoss: logits are cast to float32 before the loss",
    ),
)
