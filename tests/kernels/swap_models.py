"""Modules as people write them, for tests of the swap."""

import copy

import torch
from torch import nn
from torch.nn import functional


class Norm(nn.Module):
    """As in Llama: rounds before the weight."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(dtype)


class GemmaNorm(nn.Module):
    """Its weight is around zero, and one is added to it."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x):
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.float())).type_as(x)


class WithoutRootNorm(Norm):
    """Looks like an RMSNorm, and divides by the mean of squares itself."""

    def forward(self, x):
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


class DroppingNorm(Norm):
    def forward(self, x):
        return functional.dropout(super().forward(x), 0.5, self.training)


class Mlp(nn.Module):
    def __init__(self, size, activation=None, bias=False):
        super().__init__()
        self.gate_proj = nn.Linear(size, 2 * size, bias=bias)
        self.up_proj = nn.Linear(size, 2 * size, bias=bias)
        self.down_proj = nn.Linear(2 * size, size, bias=bias)
        self.act_fn = activation or nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def turn(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + turn(q) * sin, k * cos + turn(k) * sin


class Attention(nn.Module):
    def __init__(self, size, heads=2):
        super().__init__()
        self.heads = heads
        self.qk_proj = nn.Linear(size, 2 * size)

    def forward(self, x, cos, sin):
        q, k = (
            one.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for one in self.qk_proj(x).chunk(2, dim=-1)
        )
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return (q + k).transpose(1, 2).flatten(-2)


class Layer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.before = Norm(size)
        self.attention = Attention(size)
        self.after = Norm(size)
        self.mlp = Mlp(size)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.before(x), cos, sin)
        return x + self.mlp(self.after(x))


class Model(nn.Module):
    """A small language model, with a loss like nanoGPT's, and tied weights."""

    def __init__(self, size=16, layers=2, vocabulary=11):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, size)
        self.layers = nn.ModuleList(Layer(size) for _ in range(layers))
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, targets=None):
        x = self.embed(tokens)
        angles = torch.arange(tokens.shape[1])[None, :, None] * torch.ones(1, 1, x.shape[-1] // 2)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return functional.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1
        )


NAMES = ("rmsnorm=eager", "layernorm=aten", "swiglu=eager", "rope=eager", "cross_entropy=eager")


def tokens(rows=2, length=5):
    return torch.arange(rows * length).reshape(rows, length) % 11


def snapshot(model):
    """Return all that a swap must leave as it was."""
    found = []
    for name, module in model.named_modules():
        hooks = [
            (key, list(value.items())) for key, value in module.__dict__.items() if "hooks" in key
        ]
        tensors = {
            key: (id(one), one.dtype, copy.deepcopy(one.detach()).tolist())
            for key, one in (*module._parameters.items(), *module._buffers.items())
            if one is not None
        }
        found.append((name, type(module), module.forward, list(module.__dict__), hooks, tensors))
    return (found, list(model.state_dict()))
