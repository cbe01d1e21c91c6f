"""Linear layers and SwiGLU: as models have them, honestly rewritten, and broken."""

import torch

from kprof.kernels.correctness import Subject


def linear(x, weight, bias):
    return torch.nn.functional.linear(x, weight, bias)


def swiglu(gate, up):
    return torch.nn.functional.silu(gate) * up


def exact_swiglu(gate, up):
    return gate / (1 + torch.exp(-gate)) * up


LINEAR = Subject(
    "linear",
    linear,
    linear,
    linear,
    lambda shape, draw: (
        draw(*shape),
        draw.plain(128, shape[1], scale=shape[1] ** -0.5),
        draw.plain(128),
    ),
    ((64, 192), (96, 128)),
    free=(0, 1),
    differentiable=(0, 1, 2),
    rows=(0,),
)
SWIGLU = Subject(
    "swiglu",
    swiglu,
    swiglu,
    exact_swiglu,
    lambda shape, draw: (draw(*shape), draw(*shape)),
    ((48, 256), (96, 192)),
    free=(0, 1),
    differentiable=(0, 1),
    rows=(0, 1),
)


def in_tiles(x, weight, bias):
    parts = zip(x.float().split(64, -1), weight.float().split(64, -1), strict=True)
    return (sum(a @ b.T for a, b in parts) + bias.float()).to(x.dtype)


def transposed_product(x, weight, bias):
    product = (weight.float() @ x.float().mT).mT + bias.float()
    return product.contiguous().to(x.dtype)


def with_fused_bias(x, weight, bias):
    return torch.addmm(bias.float(), x.float(), weight.float().T).to(x.dtype)


def rounded_once(gate, up):
    wide = gate.float()
    return (wide * torch.sigmoid(wide) * up.float()).to(gate.dtype)


def by_division(gate, up):
    wide = gate.double()
    return (wide * up / (1 + torch.exp(-wide))).to(gate.dtype)


HONEST = {
    "linear": (in_tiles, transposed_product, with_fused_bias),
    "swiglu": (rounded_once, by_division),
}


def accumulated_in_low_precision(x, weight, bias):
    """Round the running sum after every eight products, to sixteen bits."""
    low = torch.bfloat16 if x.dtype == torch.float32 else x.dtype
    parts = zip(x.split(8, -1), weight.split(8, -1), strict=True)
    total = x.new_zeros((*x.shape[:-1], weight.shape[0]), dtype=low)
    for a, b in parts:
        total = (total + (a @ b.T).to(low)).to(low)
    return total.to(x.dtype) + bias


def lost_depth_tail(x, weight, bias):
    """Leave out what the depth has beyond whole tiles of 16."""
    full = x.shape[-1] // 16 * 16
    return linear(x[..., :full], weight[:, :full], bias)


def transposed_result(x, weight, bias):
    """Leave the result transposed: a view of it, as heads of attention, is another one or fails."""
    return ((weight.float() @ x.float().mT).mT + bias.float()).to(x.dtype)


def lost_bias(x, weight, bias):
    return linear(x, weight, bias * 0)


def transposed_weight(x, weight, bias):
    return linear(x, weight.T if weight.shape[0] == weight.shape[1] else weight, bias)


def tensor_float(x, weight, bias):
    """Keep ten bits of the inputs' mantissas, as TF32 does."""
    return _shortened(x) @ _shortened(weight).T + bias


def _shortened(values):
    if values.dtype != torch.float32:
        return values
    kept = values.detach().contiguous().view(torch.int32) & ~0x1FFF
    return values + (kept.view(torch.float32) - values).detach()


def last_rows_of_the_first_tile(x, weight, bias):
    """Repeat the last full tile of rows, where rows are no multiple of 32."""
    out = linear(x, weight, bias)
    ragged = x.shape[0] % 32
    return torch.cat([out[:-ragged], out[:ragged]]) if 0 < ragged < x.shape[0] else out


def swapped_halves(gate, up):
    return swiglu(up, gate)


def gelu_instead(gate, up):
    return torch.nn.functional.gelu(gate) * up


def no_gradient_to_the_gate(gate, up):
    return (swiglu(gate.detach(), up)) + 0 * gate.nan_to_num(0, 0, 0)


def flushes_small_values(gate, up):
    out = swiglu(gate, up)
    return torch.where(out.abs() < 1e-4, torch.zeros_like(out), out)


WRONG = {
    "linear": (
        accumulated_in_low_precision,
        lost_depth_tail,
        lost_bias,
        transposed_result,
        transposed_weight,
        tensor_float,
        last_rows_of_the_first_tile,
    ),
    "swiglu": (swapped_halves, gelu_instead, no_gradient_to_the_gate, flushes_small_values),
}
