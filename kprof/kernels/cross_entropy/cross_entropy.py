"""Cross-entropy over a large vocabulary: the loss with its gradient in one read, one write.

    loss = logsumexp(x) - x[target] + z_loss * logsumexp(x)²;  dx = softmax(x) - onehot(target)

The logits x are (M, V), the targets (M,). In eager mode the gradient is written with the loss,
while the row is in the cache, and scaled later if the arriving gradient is not 1. The logits are
read again in the backward pass where this could be wrong (float16 would underflow before a gradient
scaler acts), where the factor is not known (a gradient for every row), and under torch.compile,
which does not see it. Operators with a trailing underscore overwrite the logits with the gradient.

On the GPU a CTA has a row (`_rows.py`). On Hopper, several CTAs can share a row, a cluster of them
in the sense of this package (`_clusters_kernel.py`): they wait for one another, so all of them run
at once, one per SM, by a cooperative launch.

Entered by `cross_entropy`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from kprof.kernels import OURS, Kernel, Provider, Work
from kprof.kernels.cross_entropy._rows import (
    Options,
    is_graph_kept,
    scale_once,
    write_gradients,
    write_losses,
    write_reduced,
)
from kprof.kernels.runtime import (
    IS_INTERPRETED,
    Launcher,
    alignments,
    applied,
    define,
    next_power_of_two,
    num_sms,
)

HOPPER = 9
DTYPES = (torch.bfloat16, torch.float16)
WARPS = 32
LANES = 32 * WARPS
# As many as so many threads can have; else the assembler may use half, for a second CTA.
REGISTERS = 65_536 // LANES
# Elements that a thread loads at once, and loads of a thread for one row.
# Two rows, and the gradient of one, then take 192 of the 227 KB of shared memory of a CTA.
VECTOR, MOST_TILES = 8, 4
# Columns of a row of a TMA box: 128 bytes.
WIDTH = 64
_OPTIONS = "int ignore_index, float label_smoothing, float z_loss, str reduction"
_INPUTS = f"Tensor targets, Tensor? divisor, {_OPTIONS}"
_BACKWARD_INPUTS = f"Tensor targets, Tensor state, {_OPTIONS}"
Reduction = Literal["mean", "sum", "none"]
IGNORE_INDEX = -100


def why_not_here() -> str:
    """Return why CTAs cannot share rows here; empty: they can, or may at least be compiled for."""
    if IS_INTERPRETED:
        return "Gluon has no interpreter"
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != HOPPER:
        return "written for Hopper"
    return ""


def ctas_of_row(num_columns: int) -> int:
    """Return the fewest CTAs with room for a row."""
    return -(-num_columns // (LANES * VECTOR * MOST_TILES))


def write_losses_by_clusters(
    logits: Tensor,
    targets: Tensor,
    divisor: Tensor | None,
    options: Options,
    losses: Tensor,
    state: Tensor,
    dlogits: Tensor | None,
) -> None:
    """Do what `write_losses` does, with several CTAs a row.

    Calls without a gradient, with smoothing, or with unaligned rows go to `write_losses`.
    """
    if dlogits is None or not _can_share(logits, dlogits, options):
        write_losses(logits, targets, divisor, options, losses, state, dlogits)
        return
    num_rows, num_columns = logits.shape
    group = ctas_of_row(num_columns)
    groups = min(num_rows, max(1, num_sms(logits.device) // group))
    # One word of each CTA for each row; zero is no message.
    mailbox = None
    if group > 1:
        mailbox = torch.zeros(num_rows * group, dtype=torch.int64, device=logits.device)
    # TMA wants a power of two of boxes.
    boxes = next_power_of_two(-(-num_columns // (group * LANES * VECTOR)))
    described = _describe(logits, group, boxes), _describe(dlogits, group, 1)
    tensors = (logits, targets, divisor, losses, state, dlogits, mailbox, *described)
    strides = logits.stride(0), dlogits.stride(0)
    constants = options.reduction == "mean", num_columns, group
    types = logits.device, logits.dtype, None if divisor is None else divisor.dtype
    key = types, *strides, constants, alignments((targets, divisor, losses, state))
    chosen = options.ignore_index, options.z_loss
    arguments = (*tensors, *strides, num_rows, groups, *chosen, *constants)
    how = {"num_warps": WARPS, "launch_cooperative_grid": True, "maxnreg": REGISTERS}
    _launcher()(key, groups * group, arguments, how)


def _can_share(logits: Tensor, dlogits: Tensor, options: Options) -> bool:
    """Return whether rows are aligned, of whole boxes, and all CTAs of a row can run at once."""
    num_columns = logits.shape[1]
    steps = num_columns, logits.stride(0), dlogits.stride(0)
    is_aligned = alignments((logits, dlogits), *steps) == 0 and num_columns % WIDTH == 0
    is_here = logits.device.type == "cuda"
    has_room = not is_here or ctas_of_row(num_columns) <= num_sms(logits.device)
    return is_aligned and has_room and not options.smoothing and logits.dtype in DTYPES


def _describe(rows: Tensor, group: int, boxes: int) -> Any:
    """Return the TMA descriptor of rows, for so many boxes at a time.

    If all CTAs have equal parts, nothing beyond a part is copied.
    """
    from kprof.kernels.tiles.gluon import describe

    num_rows, num_columns = rows.shape
    box = (1, 1, boxes * LANES * VECTOR // WIDTH, WIDTH)
    chunks = group if num_columns % (group * WIDTH) == 0 else 1
    shape = (num_rows, chunks, num_columns // (chunks * WIDTH), WIDTH)
    strides = (rows.stride(0), num_columns // chunks, WIDTH, 1)
    return describe(rows, shape, strides, box)


@cache
def _launcher() -> Launcher:
    from kprof.kernels.cross_entropy._clusters_kernel import losses_cluster_kernel

    return Launcher(losses_cluster_kernel)


def has_contiguous_columns(logits: Tensor) -> bool:
    """Return whether rows can be read and written without a copy."""
    return logits.stride(-1) == 1


def _as_rows(logits: Tensor) -> Tensor:
    return logits if has_contiguous_columns(logits) else logits.contiguous()


def _empty_results(logits: Tensor, reduction: str) -> tuple[Tensor, Tensor]:
    """Return empty tensors for the loss, and for the state of the rows."""
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
    """Write the gradient, if `dlogits` is given; return the loss, and the state of the rows."""
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


def _define_both(name: str, write: Callable[..., None]) -> tuple[Callable[..., Any], ...]:
    """Define loss and gradient in one pass: with a new gradient, and in place of the logits."""
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
    """Return the cross-entropy in float32, as if the logits were cast to float32.

    A target outside of the vocabulary, except `ignore_index`, makes its loss NaN.

    Args:
        logits: (M, V); float32, float16 or bfloat16.
        targets: (M,) int64.
        ignore_index: A target that does not count; the gradient of its row is zero.
        label_smoothing: The share of each target that is spread over the vocabulary.
        reduction: As in torch.
        z_loss: Factor of logsumexp(x)², which is added for each row.
        divisor: Divides the sum, such as the number of targets of all micro-batches. A division
            afterwards would take one more pass over the gradient.
        may_overwrite: Whether the gradient may overwrite the logits. They must not be read then.
        shares_rows: Whether several CTAs of a Hopper GPU share a row, and read it once, if loss and
            gradient are computed together. Label smoothing, float32 and unaligned rows are swept.
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
    """The gradient is computed with the loss, for an arriving gradient of 1."""

    @staticmethod
    def forward(
        ctx: Any, logits, targets, divisor, options, may_overwrite: bool, shares_rows: bool
    ) -> Tensor:
        if may_overwrite and has_contiguous_columns(logits):
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
    """The gradient is computed in the backward pass, when its factor is known."""

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
        if ctx.may_overwrite and is_last and has_contiguous_columns(logits):
            operator_gradient_over(*arguments)
            torch.autograd.graph.increment_version(logits)
            return logits, None, None, None, None
        return operator_gradient(*arguments), None, None, None, None


def _reference(logits: Tensor, targets: Tensor, *options: Any, **named: Any) -> Tensor:
    """Compute what the loss function of Hugging Face's language models does."""
    return _truth(logits.float(), targets, *options, **named)


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
    """Count the logits, read once; 4 FLOPs per element."""
    return Work(4 * logits.numel(), logits.element_size() * logits.numel())


def _backward_work(logits: Tensor, *others: Any) -> Work:
    """Count the gradient, written once; the logits were read for the loss. 4 FLOPs per element."""
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


operator_loss = define(
    f"cross_entropy(Tensor logits, {_INPUTS}) -> (Tensor, Tensor)",
    _run_loss,
    lambda logits, targets, divisor, *options: _empty_results(logits, options[-1]),
)
operator_both, operator_both_over = _define_both("cross_entropy_with_gradient", write_losses)
operator_both_shared, operator_both_shared_over = _define_both(
    "cross_entropy_with_gradient_shared", write_losses_by_clusters
)
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
_in_one_pass, _in_two_passes = applied(_InOnePass), applied(_InTwoPasses)
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
