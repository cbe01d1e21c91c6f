"""Softmax and cross-entropy: as models have them, honestly rewritten, and broken."""

import torch

from kprof.kernels.correctness import Subject


def softmax(x):
    return torch.softmax(x, -1)


def cross_entropy(logits, targets):
    return torch.nn.functional.cross_entropy(logits, targets, ignore_index=0)


def exact_cross_entropy(logits, targets):
    losses = torch.logsumexp(logits, -1) - logits.gather(-1, targets[:, None])[:, 0]
    is_counted = targets != 0
    return torch.where(is_counted, losses, 0.0).sum() / is_counted.sum()


def _targets(shape, draw):
    """Return classes; those that are 0 are ignored, every fourth and never the first."""
    targets = draw.integers(shape[1], shape[0]).clamp(min=1) % shape[1]
    targets[3::4] = 0
    return targets


SOFTMAX = Subject(
    "softmax",
    softmax,
    softmax,
    softmax,
    lambda shape, draw: (draw(*shape),),
    ((48, 256), (96, 192)),
    free=(0, 1),
    differentiable=(0,),
    rows=(0,),
)
CROSS_ENTROPY = Subject(
    "cross-entropy",
    cross_entropy,
    cross_entropy,
    exact_cross_entropy,
    lambda shape, draw: (draw(*shape), _targets(shape, draw)),
    ((64, 256), (32, 512)),
    free=(0, 1),
    differentiable=(0,),
)


def online(x):
    """Keep a running maximum over tiles, as kernels do that read a row once."""
    # Cast once: two casts would round two halves of a gradient that cancel.
    wide = x.float()
    top = x.new_full((*x.shape[:-1], 1), -torch.inf, dtype=torch.float32)
    total = torch.zeros_like(top)
    for tile in wide.split(64, -1):
        new = torch.maximum(top, tile.amax(-1, keepdim=True)).detach()
        total = total * torch.exp(top - new) + torch.exp(tile - new).sum(-1, keepdim=True)
        top = new
    return (torch.exp(wide - top) / total).to(x.dtype)


def in_double(x):
    return torch.softmax(x.double(), -1).to(x.dtype)


def with_reciprocal(x):
    wide = x.float()
    powers = torch.exp(wide - wide.amax(-1, keepdim=True).detach())
    return (powers * (1 / powers.sum(-1, keepdim=True))).to(x.dtype)


def loss_of_shifted_logits(logits, targets):
    """Subtract the maximum first, as every kernel does that keeps its digits."""
    wide = logits.float()
    shifted = wide - wide.amax(-1, keepdim=True).detach()
    losses = shifted.exp().sum(-1).log() - shifted.gather(-1, targets[:, None])[:, 0]
    counted = targets != 0
    return (torch.where(counted, losses, 0.0).sum() / counted.sum()).to(logits.dtype)


def loss_in_double(logits, targets):
    return cross_entropy(logits.double(), targets).to(logits.dtype)


HONEST = {
    "softmax": (online, with_reciprocal, in_double),
    "cross-entropy": (loss_of_shifted_logits, loss_in_double),
}


def without_maximum(x):
    powers = torch.exp(x.float())
    return (powers / powers.sum(-1, keepdim=True)).to(x.dtype)


def maximum_of_all_rows(x):
    if not x.numel():
        return softmax(x)
    powers = torch.exp(x.float() - x.float().max().detach())
    return (powers / powers.sum(-1, keepdim=True)).to(x.dtype)


def skipped_tile(x):
    """Leave the last tile out of the sum, where there is more than one."""
    if x.shape[-1] <= 128:
        return softmax(x)
    powers = torch.exp(x.float() - x.float().amax(-1, keepdim=True).detach())
    return (powers / powers[..., :-64].sum(-1, keepdim=True)).to(x.dtype)


def padded_with_zeros(x):
    """Pad a ragged row with zeros instead of minus infinity."""
    padding = -x.shape[-1] % 64
    padded = torch.nn.functional.pad(x, (0, padding))
    return softmax(padded)[..., : x.shape[-1]]


def infinity_unlike_the_original(x):
    """Lose the digits of large logits, and make NaN of what a row with -inf has left."""
    wide = x.float()
    return torch.exp(wide - torch.logsumexp(wide.nan_to_num(0.0), -1, keepdim=True)).to(x.dtype)


def loss_from_logsumexp(logits, targets):
    """Cancel two large numbers: the digits of the loss are lost where logits are large."""
    wide = logits.float()
    losses = torch.logsumexp(wide, -1) - wide.gather(-1, targets[:, None])[:, 0]
    counted = targets != 0
    return (torch.where(counted, losses, 0.0).sum() / counted.sum()).to(logits.dtype)


def wrong_reduction(logits, targets):
    return torch.nn.functional.cross_entropy(logits, targets, ignore_index=0, reduction="sum")


def mean_over_ignored_too(logits, targets):
    return wrong_reduction(logits, targets) / targets.numel()


def ignores_nothing(logits, targets):
    return torch.nn.functional.cross_entropy(logits, targets)


def gradient_not_scaled(logits, targets):
    return GradientNotScaled.apply(logits, targets)


class GradientNotScaled(torch.autograd.Function):
    """Compute the gradient in the forward pass, and forget what arrives."""

    @staticmethod
    def forward(ctx, logits, targets):
        with torch.enable_grad():
            logits = logits.detach().requires_grad_()
            loss = cross_entropy(logits, targets)
        ctx.save_for_backward(torch.autograd.grad(loss, logits)[0])
        return loss.detach()

    @staticmethod
    def backward(ctx, arriving):
        return ctx.saved_tensors[0], None


WRONG = {
    "softmax": (
        without_maximum,
        maximum_of_all_rows,
        skipped_tile,
        padded_with_zeros,
        infinity_unlike_the_original,
    ),
    "cross-entropy": (
        wrong_reduction,
        mean_over_ignored_too,
        ignores_nothing,
        gradient_not_scaled,
        loss_from_logsumexp,
    ),
}
