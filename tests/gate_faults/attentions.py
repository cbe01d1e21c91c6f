"""Causal attention with grouped heads, and RoPE: as models have them, rewritten, and broken.

Shapes: (batch, query heads, length, head size); there are half as many key heads.
"""

import torch

from kprof.kernels.correctness import Subject

GROUP = 2


def attention(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )


def _spread_heads(kv):
    return kv.repeat_interleave(GROUP, 1)


def plain(q, k, v, *, scale=None, diagonal=0, spread=_spread_heads):
    """Compute attention with all scores at once, in the dtype of the inputs."""
    k, v = spread(k), spread(v)
    scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + diagonal)
    return torch.softmax(scores.masked_fill(future, -torch.inf), -1) @ v


def rope(x, cosine, sine):
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


def _attention_inputs(shape, draw):
    batch, heads, length, size = shape
    keys = (batch, heads // GROUP, length, size)
    return draw(*shape), draw(*keys), draw(*keys)


def _rope_inputs(shape, draw):
    _, _, length, size = shape
    angle = torch.arange(length)[:, None] / 10_000 ** (torch.arange(size // 2) * 2 / size)
    angle = torch.cat((angle, angle), -1)
    dtype = draw.dtype
    return draw(*shape), angle.cos().to(dtype), angle.sin().to(dtype)


ATTENTION = Subject(
    "attention",
    attention,
    attention,
    plain,
    _attention_inputs,
    ((2, 4, 48, 32), (1, 4, 96, 32)),
    free=(0, 2),
    differentiable=(0, 1, 2),
    # Scores of a thousand make a softmax of one: its gradient is all cancellation.
    large=12.0,
    rows=(0, 1, 2),
)
ROPE = Subject(
    "rope",
    rope,
    rope,
    rope,
    _rope_inputs,
    ((2, 4, 48, 32), (1, 4, 96, 32)),
    free=(0, 1, 2),
    differentiable=(0,),
    rows=(0,),
)


def wide_and_plain(q, k, v):
    return plain(q.float(), k.float(), v.float()).to(q.dtype)


def online(q, k, v):
    """Go over tiles of keys with a running maximum, as flash kernels do."""
    wide, keys, values = q.float(), _spread_heads(k).float(), _spread_heads(v).float()
    rows = torch.arange(q.shape[-2])
    top = q.new_full((*q.shape[:-1], 1), -torch.inf, dtype=torch.float32)
    total, out = torch.zeros_like(top), torch.zeros(q.shape)
    for start in range(0, k.shape[-2], 16):
        tile = slice(start, start + 16)
        scores = wide @ keys[:, :, tile].transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(rows[tile] > rows[:, None], -torch.inf)
        new = torch.maximum(top, scores.amax(-1, keepdim=True)).detach()
        powers, fade = torch.exp(scores - new), torch.exp(top - new)
        total = total * fade + powers.sum(-1, keepdim=True)
        out = out * fade + powers @ values[:, :, tile]
        top = new
    return (out / total).to(q.dtype)


def rounded_once(x, cosine, sine):
    return rope(x.float(), cosine.float(), sine.float()).to(x.dtype)


def by_halves(x, cosine, sine):
    first, second = x.chunk(2, -1)
    cosine, sine = cosine.chunk(2, -1)[0], sine.chunk(2, -1)[0]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def by_assignment(x, cosine, sine):
    """Write each half into its place of a result that was allocated before."""
    out, size = torch.empty_like(x), x.shape[-1] // 2
    first, second = x.chunk(2, -1)
    out[..., :size] = first * cosine[..., :size] - second * sine[..., :size]
    out[..., size:] = second * cosine[..., size:] + first * sine[..., size:]
    return out


HONEST = {
    "attention": (wide_and_plain, online),
    "rope": (rounded_once, by_halves, by_assignment),
}


def dropped_mask(q, k, v):
    return plain(q, k, v, diagonal=q.shape[-2])


def wrong_causal_offset(q, k, v):
    return plain(q, k, v, diagonal=1)


def wrong_head_mapping(q, k, v):
    return plain(q, k, v, spread=lambda kv: kv.repeat(1, GROUP, 1, 1))


def wrong_scale(q, k, v):
    return plain(q, k, v, scale=(q.shape[-1] - 1) ** -0.5)


def missing_scale(q, k, v):
    return plain(q, k, v, scale=1.0)


def transposed_heads(q, k, v):
    """Write the output with heads and positions the other way round."""
    out = attention(q, k, v)
    return out.transpose(1, 2).reshape(out.shape)


def stale_maximum(q, k, v):
    """Forget to rescale what was summed when the running maximum grows."""
    scores = (q @ _spread_heads(k).transpose(-1, -2) * q.shape[-1] ** -0.5).float()
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(future, -torch.inf)
    half = max(scores.shape[-1] // 2, 1)
    top = scores.amax(-1, keepdim=True)
    first = scores[..., :half].amax(-1, keepdim=True)
    powers = torch.exp(scores - top)
    powers = torch.cat(
        (torch.exp(scores[..., :half] - torch.maximum(first, top - 20)), powers[..., half:]), -1
    )
    out = powers / powers.sum(-1, keepdim=True) @ _spread_heads(v).float()
    return out.to(q.dtype)


def skipped_key_tile(q, k, v):
    """Leave out the keys beyond whole tiles of 16."""
    full = max(k.shape[-2] // 16 * 16, min(k.shape[-2], 16))
    kept = torch.arange(k.shape[-2]) < full
    return plain(q, k, torch.where(kept[:, None], v, 0))


def wrong_sign(x, cosine, sine):
    return rope(x, cosine, -sine)


def interleaved_halves(x, cosine, sine):
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * cosine + turned * sine


def position_off_by_one(x, cosine, sine):
    return rope(x, cosine.roll(-1, 0), sine.roll(-1, 0))


def rotates_in_place(x, cosine, sine):
    out = rope(x, cosine, sine)
    x.detach().copy_(out.detach())
    return out


WRONG = {
    "attention": (
        dropped_mask,
        wrong_causal_offset,
        wrong_head_mapping,
        wrong_scale,
        missing_scale,
        transposed_heads,
        stale_maximum,
        skipped_key_tile,
    ),
    "rope": (wrong_sign, interleaved_halves, position_off_by_one, rotates_in_place),
}
