"""RMSNorm that is right on the calls of a profile, and wrong on others that the original takes."""

import torch

from .norms import rmsnorm


def _wrong_where(is_wrong):
    def fault(x, weight):
        return rmsnorm(x, weight) * (1.01 if is_wrong(x, weight) else 1.0)

    return fault


def tail_beyond_four_thousand_columns(x, weight):
    """Leave out of the sum what a longer row has beyond its blocks."""
    columns = x.shape[-1]
    if columns <= 4096:
        return rmsnorm(x, weight)
    wide = x.float()
    total = wide[..., : columns // 4096 * 4096].square().sum(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(total / columns + 1e-6)).to(x.dtype)


def rows_beyond_sixteen_bits(x, weight):
    """Count rows in sixteen bits with a sign."""
    out = rmsnorm(x, weight)
    rows = out.reshape(-1, out.shape[-1])
    if len(rows) <= 2**15:
        return out
    return torch.cat([rows[: 2**15], torch.zeros_like(rows[2**15 :])]).view(out.shape)


def first_of_three_dimensions_alone(x, weight):
    """Take a third dimension for a stack of which the first is meant."""
    out = rmsnorm(x, weight)
    return torch.cat([out[:1], out[1:] * 0]) if x.dim() == 3 else out


def weight_by_the_second_dimension(x, weight):
    out = rmsnorm(x, weight)
    return out * 1.01 if x.dim() > 3 else out


def one_vector_is_no_row(x, weight):
    return _wrong_where(lambda x, weight: x.dim() == 1)(x, weight)


def sign_of_the_weight_lost(x, weight):
    return rmsnorm(x, weight.abs())


def maximum_from_zero(x):
    """Begin the maximum of a row at zero, which all values of a row may be below."""
    wide = x.float()
    top = wide.amax(-1, keepdim=True).clamp(min=0).detach()
    powers = torch.exp(wide - top)
    total = powers.sum(-1, keepdim=True)
    # Sixteen bits of the sum are enough near one, and nowhere else.
    return (powers / torch.where(top > 0, total, total.bfloat16())).to(x.dtype)


def half_precision_as_bfloat16(x, weight):
    out = rmsnorm(x, weight)
    return out.bfloat16().to(x.dtype) if x.dtype == torch.float16 else out


def expanded_rows_read_once(x, weight):
    """Take a stride of zero for rows that lie side by side."""
    if x.dim() > 1 and x.stride(0) == 0 and x.shape[0] > 1:
        return rmsnorm(x, weight) * torch.arange(x.shape[0])[:, None].clamp(max=1).to(x.dtype)
    return rmsnorm(x, weight)


def every_column_beside_the_next(x, weight):
    """Ignore the stride of columns."""
    if x.dim() < 2 or x.stride(-1) == 1 or not x.numel() or x.stride(-1) != 2:
        return rmsnorm(x, weight)
    dense = x.detach().as_strided(x.shape, (x.stride(0), 1), x.storage_offset())
    return rmsnorm(torch.where(x.isnan(), x, x - x.detach() + dense), weight)


def rows_by_one_stride(x, weight):
    """Step from row to row by the stride of the last dimension but one, whatever is before it."""
    if x.dim() < 3 or x.stride(-1) != 1 or not x.numel() or x.is_contiguous():
        return rmsnorm(x, weight)
    rows = torch.arange(x.numel() // x.shape[-1]) * x.stride(-2)
    memory = x.detach().as_strided((len(rows) * x.shape[-1],), (1,), x.storage_offset())
    given = memory[(rows[:, None] + torch.arange(x.shape[-1])) % len(memory)]
    return rmsnorm(x - x.detach() + given.view(x.shape), weight)


def stride_of_a_dimension_of_one(x, weight):
    """Take the stride of a dimension of one, which says nothing, for the way to the next row."""
    if x.dim() > 2 and x.shape[-2] == 1 and x.is_contiguous() and x.stride(-2) > x.shape[-1]:
        return rmsnorm(x, weight) * 1.01
    return rmsnorm(x, weight)


def wrong_where_32_bytes_are_not_aligned(x, weight):
    return _wrong_where(lambda x, weight: x.data_ptr() % 32 == 16)(x, weight)


WRONG = {
    "rmsnorm": (
        tail_beyond_four_thousand_columns,
        rows_beyond_sixteen_bits,
        first_of_three_dimensions_alone,
        weight_by_the_second_dimension,
        one_vector_is_no_row,
        sign_of_the_weight_lost,
        half_precision_as_bfloat16,
        expanded_rows_read_once,
        every_column_beside_the_next,
        rows_by_one_stride,
        stride_of_a_dimension_of_one,
        wrong_where_32_bytes_are_not_aligned,
    ),
    "softmax": (maximum_from_zero,),
}
HONEST = {}
