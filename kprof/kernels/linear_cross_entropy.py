"""The last linear layer and its cross-entropy in one, without float32 logits in memory.

Saving time, the gradients are made beside the loss, and each logit is computed once. Saving memory,
logits are computed a piece at a time, once for the loss and once more for the gradients.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from kprof.kernels import OURS, Kernel, Provider, Work
from kprof.kernels._cross_entropy import Options
from kprof.kernels._linear_cross_entropy_operators import (
    operator_by_rows,
    operator_gradients,
    operator_loss,
)
from kprof.kernels._operator import applied
from kprof.kernels._scaling import scale_once
from kprof.kernels.cross_entropy import IGNORE_INDEX, Reduction, cross_entropy

Saves = Literal["time", "memory"]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    *,
    z_loss: float = 0.0,
    divisor: Tensor | float | None = None,
    saves: Saves = "time",
) -> Tensor:
    """Return the cross-entropy, in float32, of hidden @ weight.T + bias.

    Logits are rounded to the dtype of `hidden`, as the layer rounds them. Where gradients cannot
    be made before it is known what they are multiplied by (float16, a loss for every row), memory
    is saved whatever was asked for.

    Args:
        hidden: (M, H); float32, float16 or bfloat16.
        weight: (V, H), of the same dtype; under autocast both are cast.
        targets: (M,) int64.
        bias: (V,).
        ignore_index: A target that does not count.
        label_smoothing: The share of each target that is spread over the vocabulary.
        reduction: As in torch.
        z_loss: As of `cross_entropy`.
        divisor: As of `cross_entropy`.
        saves: "time": 6 M H V FLOPs, and half of the logits in memory beside the gradients (of many
            rows those of 2,048, and a gradient in float32). "memory": 8 M H V FLOPs, and a
            twentieth of the logits.
    """
    hidden, weight, bias = _autocast(hidden, weight, bias)
    options = Options(ignore_index, float(label_smoothing), float(z_loss), reduction)
    if divisor is not None and not isinstance(divisor, Tensor):
        divisor = torch.full((), divisor, dtype=torch.float32, device=hidden.device)
    leaves = [one for one in (hidden, weight, bias) if one is not None]
    if not (torch.is_grad_enabled() and any(one.requires_grad for one in leaves)):
        return operator_loss(hidden, weight, bias, targets, divisor, *options)[0]
    is_known = reduction != "none" and hidden.dtype != torch.float16
    way = _by_rows if is_known and saves == "time" else _by_pieces
    loss: Tensor = way(hidden, weight, bias, targets, divisor, options)
    return loss


def logits_and_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return the logits, too, for who has to see them; options as of `cross_entropy`."""
    logits = functional.linear(hidden, weight, bias)
    return logits, cross_entropy(logits, targets, **options)


class _ByRows(torch.autograd.Function):
    """The gradients are made with the loss, for an arriving gradient of one."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, targets, divisor, options: Options) -> Tensor:
        wanted = ctx.needs_input_grad[:3]
        loss, *gradients = operator_by_rows(
            hidden, weight, bias, targets, divisor, wanted, *options
        )
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        found = [
            (scale_once(gradient, dloss) if is_needed else None)
            for gradient, is_needed in zip(ctx.saved_tensors, needs, strict=False)
        ]
        return *found, None, None, None


class _ByPieces(torch.autograd.Function):
    """The gradients are made when it is known what they are multiplied by."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, targets, divisor, options: Options) -> Tensor:
        loss, state = operator_loss(hidden, weight, bias, targets, divisor, *options)
        ctx.save_for_backward(hidden, weight, bias, targets, state)
        ctx.options = options
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[:3]
        found = operator_gradients(dloss, *ctx.saved_tensors, needs, *ctx.options)
        pairs = zip(found, needs, strict=True)
        return *(one if is_needed else None for one, is_needed in pairs), None, None, None


_by_rows, _by_pieces = applied(_ByRows), applied(_ByPieces)


def _autocast(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast what a linear layer casts under autocast."""
    kind = hidden.device.type
    if not torch.is_autocast_enabled(kind):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Do what a language model of Hugging Face does: layer, cast to float32, loss."""
    logits = functional.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(
        logits,
        targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )


def _refuses(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, *options: Any
) -> str | None:
    tensors = [one for one in (hidden, weight, targets, bias) if one is not None]
    for tensor in tensors:
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return f"a {type(tensor).__name__} is no plain tensor"
    if hidden.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"{hidden.dtype} is none of float32, float16 and bfloat16"
    if weight.dtype != hidden.dtype or (bias is not None and bias.dtype != hidden.dtype):
        return f"the weight is {weight.dtype}, the input {hidden.dtype}"
    if targets.dtype != torch.int64:
        return f"targets of {targets.dtype}: they have to be indices in int64"
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1]:
        return f"rows of shape {tuple(hidden.shape)} for targets of {tuple(targets.shape)}"
    return None


def _work(hidden: Tensor, weight: Tensor, *others: Any) -> Work:
    """Count the product, hidden and weight read."""
    flops = 2 * hidden.numel() * weight.shape[0]
    return Work(flops, hidden.element_size() * (hidden.numel() + weight.numel()))


def _backward_work(hidden: Tensor, weight: Tensor, *others: Any) -> Work:
    """Count two products; hidden and weight read, their gradients written."""
    flops = 4 * hidden.numel() * weight.shape[0]
    return Work(flops, 2 * hidden.element_size() * (hidden.numel() + weight.numel()))


def _saving_memory() -> Any:
    return lambda *inputs: linear_cross_entropy(*inputs, saves="memory")


def _inductor() -> Any:
    return torch.compile(_reference, dynamic=False)


def _liger() -> Any:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return lambda hidden, weight, targets, bias=None: LigerFusedLinearCrossEntropyFunction.apply(
        hidden, weight, targets, bias
    )[0]


def _quack() -> Any:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return lambda hidden, weight, targets: chunked_linear_cross_entropy(hidden, weight, targets)


KERNEL = Kernel(
    name="linear_cross_entropy",
    replaces="the last linear layer of a language model of Hugging Face, and its loss",
    reference=_reference,
    truth=_reference,
    providers=(
        Provider(OURS, lambda: linear_cross_entropy, "kprof"),
        Provider("kprof-lean", _saving_memory, "kprof"),
        Provider("eager", lambda: _reference),
        Provider("inductor", _inductor),
        Provider("liger", _liger, "liger-kernel"),
        Provider("quack", _quack, "quack-kernels"),
    ),
    refuses=_refuses,
    inputs=lambda shape, draw: (
        draw(shape[0], shape[1]),
        draw.plain(shape[2], shape[1], scale=shape[1] ** -0.5),
        draw.integers(shape[2], shape[0]),
    ),
    work=_work,
    shapes=((8_192, 4_096, 128_256), (8_192, 2_048, 128_256), (16_384, 4_096, 32_000)),
    edges=((5, 33, 127), (70, 16, 1_000)),
    reach=(2**19,),
    differentiable=(0, 1),
    backward_work=_backward_work,
    sources=(
        "Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv 1805.02867",
        "Wijmans and others, Cut your losses in large-vocabulary language models, arXiv 2411.09009",
    ),
)
