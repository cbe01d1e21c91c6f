"""A tiny Llama of our own, whose parts can be swapped, and how the gate observes it."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from kprof.kernels.correctness import Curve, Generation

from .attentions import attention
from .norms import rmsnorm
from .products import swiglu

VOCABULARY, WIDTH, HEADS, LAYERS = 64, 32, 4, 4


@dataclass(frozen=True)
class Parts:
    """The functions that a swap replaces; `residual` scales what a layer adds."""

    norm: object = rmsnorm
    attention: object = attention
    swiglu: object = swiglu
    residual: float = 1.0


def weights(dtype=torch.float32, seed=0):
    """Return the weights of a model, larger than a fresh one's, so that it has opinions."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale * shape[-1] ** -0.5).to(dtype)

    layers = [
        {
            "norm1": torch.ones(WIDTH, dtype=dtype),
            "q": matrix(WIDTH, WIDTH),
            "k": matrix(WIDTH // 2, WIDTH),
            "v": matrix(WIDTH // 2, WIDTH),
            "o": matrix(WIDTH, WIDTH),
            "norm2": torch.ones(WIDTH, dtype=dtype),
            "gate": matrix(2 * WIDTH, WIDTH),
            "up": matrix(2 * WIDTH, WIDTH),
            "down": matrix(WIDTH, 2 * WIDTH),
        }
        for _ in range(LAYERS)
    ]
    embedding = matrix(VOCABULARY, WIDTH, scale=WIDTH**0.5)
    return {"embedding": embedding, "head": matrix(VOCABULARY, WIDTH, scale=2.0), "layers": layers}


def hidden(model, tokens, parts):
    """Return the residual stream after every layer."""
    x = model["embedding"][tokens]
    found = []
    for layer in model["layers"]:
        y = parts.norm(x, layer["norm1"])
        q, k, v = (_heads(y @ layer[name].T) for name in "qkv")
        mixed = parts.attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + parts.residual * (mixed @ layer["o"].T)
        y = parts.norm(x, layer["norm2"])
        x = x + parts.swiglu(y @ layer["gate"].T, y @ layer["up"].T) @ layer["down"].T
        found.append(x)
    return found


def _heads(x):
    return x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)


def logits(model, tokens, parts):
    """Return the logits at every position."""
    return (
        parts.norm(hidden(model, tokens, parts)[-1], torch.ones_like(model["head"][0]))
        @ model["head"].T
    )


def generate(model, prompts, parts, num_tokens=12):
    """Continue every prompt greedily, all at once, with the five likeliest tokens of each step."""
    tokens, top = prompts, []
    for _ in range(num_tokens):
        found = torch.log_softmax(logits(model, tokens, parts)[:, -1].float(), -1).topk(5)
        top.append(found)
        tokens = torch.cat((tokens, found.indices[:, :1]), -1)
    return [
        Generation(
            tokens=row[prompts.shape[1] :].tolist(),
            top=[
                dict(zip(step.indices[i].tolist(), step.values[i].tolist(), strict=True))
                for step in top
            ],
        )
        for i, row in enumerate(tokens)
    ]


def train(parts, seed, steps=120, rate=3e-3, dtype=torch.float32):
    """Train on a repeated pattern with AdamW; the seed decides weights and data."""
    model = weights(dtype, seed)
    leaves = [model["embedding"], model["head"]]
    leaves += [tensor for layer in model["layers"] for tensor in layer.values()]
    for leaf in leaves:
        leaf.requires_grad_()
    optimizer = torch.optim.AdamW(leaves, lr=rate)
    generator = torch.Generator().manual_seed(100 + seed)
    losses, norms = [], []
    for _ in range(steps):
        start = torch.randint(VOCABULARY, (8, 1), generator=generator)
        tokens = (start + 3 * torch.arange(17)) % VOCABULARY
        found = logits(model, tokens[:, :-1], parts)
        loss = functional.cross_entropy(found.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(sum(leaf.grad.double().square().sum() for leaf in leaves) ** 0.5))
        optimizer.step()
        losses.append(float(loss.detach()))
    return Curve(losses, norms)
