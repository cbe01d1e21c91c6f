"""RMSNorm and LayerNorm: as models have them, as others would honestly write them, and broken."""

import random

import torch

from kprof.kernels.correctness import Subject

EPS = 1e-6


def rmsnorm(x, weight):
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * (wide * scale).to(x.dtype)


def exact_rmsnorm(x, weight):
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def layernorm(x, weight, bias):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def exact_layernorm(x, weight, bias):
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + EPS) * weight + bias


RMSNORM = Subject(
    "rmsnorm",
    rmsnorm,
    rmsnorm,
    exact_rmsnorm,
    lambda shape, draw: (draw(*shape), draw.plain(shape[-1], scale=0.2, shift=1.0)),
    ((48, 256), (96, 192)),
    free=(0, 1),
    dtypes=("float32", "bfloat16", "float16"),
    differentiable=(0, 1),
    rows=(0,),
)
LAYERNORM = Subject(
    "layernorm",
    layernorm,
    layernorm,
    exact_layernorm,
    lambda shape, draw: (
        draw(*shape),
        draw.plain(shape[-1], scale=0.2, shift=1.0),
        draw.plain(shape[-1]),
    ),
    ((48, 256), (96, 192)),
    # One column has no variance: its gradient is zero, and all of it rounding.
    free=(0,),
    differentiable=(0, 1, 2),
    rows=(0,),
)


def fused(x, weight):
    """Multiply by the weight in float32 and round once, as fused kernels do."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().sum(-1, keepdim=True) / x.shape[-1] + EPS)
    return (wide * scale * weight.float()).to(x.dtype)


def summed_in_tiles(x, weight):
    wide = x.float()
    total = sum(tile.square().sum(-1, keepdim=True) for tile in wide.split(64, -1))
    return weight * (wide / torch.sqrt(total / x.shape[-1] + EPS)).to(x.dtype)


def summed_backwards(x, weight):
    wide = x.float()
    scale = torch.rsqrt(wide.flip(-1).pow(2).mean(-1, keepdim=True) + EPS)
    return weight * (wide * scale).to(x.dtype)


def with_own_backward(x, weight):
    return OwnBackward.apply(x, weight)


class OwnBackward(torch.autograd.Function):
    """A backward written by hand, in float32."""

    keeps = 1.0

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return rmsnorm(x, weight)

    @staticmethod
    def backward(ctx, arriving):
        x, weight = (one.float() for one in ctx.saved_tensors)
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
        normed, given = x * scale, arriving.float()
        inner = given * weight
        gradient = scale * (inner - normed * (inner * normed).mean(-1, keepdim=True))
        dtype = ctx.saved_tensors[0].dtype
        return gradient.to(dtype), (given * normed).flatten(0, -2).sum(0).to(dtype)


def one_pass_in_double(x, weight, bias):
    wide = x.double()
    mean = wide.mean(-1, keepdim=True)
    variance = wide.square().mean(-1, keepdim=True) - mean.square()
    return ((wide - mean) * torch.rsqrt(variance + EPS) * weight + bias).to(x.dtype)


def two_passes(x, weight, bias):
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS)
    return (centred * scale * weight.float() + bias.float()).to(x.dtype)


HONEST = {
    "rmsnorm": (fused, summed_in_tiles, summed_backwards, with_own_backward),
    "layernorm": (one_pass_in_double, two_passes),
}


def tail_off_by_one(x, weight):
    wide = x.float()
    total = wide[..., :-1].pow(2).sum(-1, keepdim=True) if x.shape[-1] > 1 else wide.pow(2)
    return weight * (wide * torch.rsqrt(total / x.shape[-1] + EPS)).to(x.dtype)


def last_element_not_scaled(x, weight):
    out = rmsnorm(x, weight)
    return torch.cat([out.flatten()[:-1], x.flatten()[-1:]]).view(x.shape)


def wrong_eps(x, weight):
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def fp16_overflow(x, weight):
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def low_precision_accumulation(x, weight):
    total = x.new_zeros((*x.shape[:-1], 1))
    for column in x.split(8, -1):
        total = total + column.pow(2).sum(-1, keepdim=True)
    return weight * (x * torch.rsqrt(total / x.shape[-1] + EPS))


def stale_scale(x, weight):
    """Take the scale of the row before."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS).roll(1, 0)
    return weight * (wide * scale).to(x.dtype)


def zero_output(x, weight):
    return torch.zeros_like(rmsnorm(x, weight)) + 0 * rmsnorm(x, weight)


def race(x, weight):
    """Lose the last part of a sum now and then."""
    wide = x.float()
    kept = wide if random.random() < 0.6 else wide[..., : max(1, wide.shape[-1] - 4)]
    total = kept.pow(2).sum(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(total / x.shape[-1] + EPS)).to(x.dtype)


def order_race(x, weight):
    """Sum in an order that differs from run to run: right, but not the same."""
    wide = x.float()
    order = torch.tensor(random.sample(range(x.shape[-1]), x.shape[-1]), dtype=torch.long)
    total = sum(wide[..., order].pow(2).split(1, -1))
    return weight * (wide * torch.rsqrt(total / x.shape[-1] + EPS)).to(x.dtype)


def ignored_strides(x, weight):
    """Read the memory behind `x` as if it were dense."""
    if x.numel() == 0:
        return rmsnorm(x, weight)
    steps = torch.empty(x.shape, device="meta").stride()
    dense = x.detach().as_strided(x.shape, steps, x.storage_offset())
    return Straight.apply(x, weight, rmsnorm(dense, weight.detach()))


def ignored_storage_offset(x, weight):
    start = x.detach().as_strided(x.shape, x.stride(), 0)
    return Straight.apply(x, weight, rmsnorm(start, weight.detach()))


def int32_offset_overflow(x, weight):
    """Lose rows whose offset does not fit 32 bits."""
    reached = torch.arange(x.shape[0]) * x.stride(0) < 2**31
    return rmsnorm(torch.where(reached[:, None], x, 0), weight)


def wrong_broadcast(x, weight):
    """Apply the weight of the row where the matrix is square enough."""
    if x.shape[0] >= x.shape[-1]:
        return rmsnorm(x, weight)
    return rmsnorm(x, torch.ones_like(weight)) * weight[: x.shape[0], None]


def writes_input_in_place(x, weight):
    out = rmsnorm(x, weight)
    x.detach().mul_(1.0001)
    return out


def writes_past_the_end(x, weight):
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out.copy_(rmsnorm(x, weight).detach())
    if out.numel():
        out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(1.0)
    return rmsnorm(x, weight)


def writes_past_its_input(x, weight):
    if x.numel():
        end = x.storage_offset() + sum(
            (n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)
        )
        if end + 1 < x.untyped_storage().nbytes() // x.element_size():
            x.detach().as_strided((1,), (1,), end + 1).fill_(1.0)
    return rmsnorm(x, weight)


def uninitialised_tail(x, weight):
    """Leave the elements past the last full tile of the rows unwritten."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    full = max(x.shape[0] - 1, 0)
    out[:full] = rmsnorm(x, weight)[:full].detach()
    return Straight.apply(x, weight, out)


class Straight(torch.autograd.Function):
    """Return `out` going forward, and the right gradients."""

    @staticmethod
    def forward(ctx, x, weight, out):
        ctx.save_for_backward(x, weight)
        return out

    @staticmethod
    def backward(ctx, arriving):
        with torch.enable_grad():
            x, weight = (one.detach().requires_grad_() for one in ctx.saved_tensors)
            out = rmsnorm(x, weight)
        return *torch.autograd.grad(out, (x, weight), arriving), None


def swallowed_nan(x, weight):
    return rmsnorm(torch.nan_to_num(x), weight)


def weight_gradient_of_one_row_block(x, weight):
    return HalfOfTheRows.apply(x, weight)


class HalfOfTheRows(OwnBackward):
    """Sum the weight's gradient over all but the last tile of rows."""

    @staticmethod
    def backward(ctx, arriving):
        x, weight = ctx.saved_tensors
        gradient, _ = OwnBackward.backward(ctx, arriving)
        full = max(x.shape[0] - 8, 1)
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
        part = (arriving.float() * x.float() * scale)[:full].sum(0)
        return gradient, part.to(weight.dtype)


def gradient_added_twice(x, weight):
    return AddsItself.apply(x, weight)


class AddsItself(OwnBackward):
    """Write into the gradient that is there, instead of leaving that to autograd."""

    @staticmethod
    def backward(ctx, arriving):
        weight = ctx.saved_tensors[1]
        gradient, of_weight = OwnBackward.backward(ctx, arriving)
        if weight.grad is not None:
            weight.grad.add_(of_weight)
        return gradient, of_weight


def writes_into_the_arriving_gradient(x, weight):
    return WritesArriving.apply(x, weight)


class WritesArriving(OwnBackward):
    """Use the arriving gradient as scratch space."""

    @staticmethod
    def backward(ctx, arriving):
        found = OwnBackward.backward(ctx, arriving)
        arriving[(0,) * arriving.dim()] = 7.0
        return found


def single_pass_variance(x, weight, bias):
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    variance = wide.square().mean(-1, keepdim=True) - mean.square()
    scale = torch.rsqrt(variance.clamp(min=0) + EPS)
    return ((wide - mean) * scale * weight.float() + bias.float()).to(x.dtype)


def dropped_bias(x, weight, bias):
    return layernorm(x, weight, bias * 0)


def unbiased_variance(x, weight, bias):
    wide = x.float()
    columns = max(x.shape[-1] - 1, 1)
    centred = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().sum(-1, keepdim=True) / columns + EPS)
    return ((wide - wide.mean(-1, keepdim=True)) * scale * weight + bias).to(x.dtype)


def misaligned_loads(x, weight, bias):
    """Assume that rows start at a multiple of 16 bytes."""
    if x.numel() and x.storage_offset() * x.element_size() % 16:
        size = 16 // x.element_size()
        return layernorm(
            x.as_strided(x.shape, x.stride(), x.storage_offset() // size * size), weight, bias
        )
    return layernorm(x, weight, bias)


WRONG = {
    "rmsnorm": (
        tail_off_by_one,
        last_element_not_scaled,
        wrong_eps,
        fp16_overflow,
        low_precision_accumulation,
        stale_scale,
        zero_output,
        race,
        order_race,
        ignored_strides,
        ignored_storage_offset,
        int32_offset_overflow,
        wrong_broadcast,
        writes_input_in_place,
        writes_past_the_end,
        writes_past_its_input,
        uninitialised_tail,
        swallowed_nan,
        weight_gradient_of_one_row_block,
        gradient_added_twice,
        writes_into_the_arriving_gradient,
    ),
    "layernorm": (single_pass_variance, dropped_bias, unbiased_variance, misaligned_loads),
}
