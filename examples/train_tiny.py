"""Train a small Llama-like transformer on random tokens.

Profile it:  kprof run examples/train_tiny.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x, rotation):
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = rotate(heads[0], rotation), rotate(heads[1], rotation), heads[2]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a gated feed-forward layer, each after a norm and around a residual."""

    def __init__(self, width, num_heads):
        super().__init__()
        self.attention_norm, self.feed_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, num_heads)
        self.gate_up = nn.Linear(width, 6 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x, rotation):
        x = x + self.attention(self.attention_norm(x), rotation)
        gate, up = self.gate_up(self.feed_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class TinyLlama(nn.Module):
    """A stack of blocks between an embedding and a projection to the vocabulary."""

    def __init__(self, vocabulary, width, num_heads, num_layers):
        super().__init__()
        self.head_width = width // num_heads
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        rotation = angles(tokens.shape[1], self.head_width, tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x))


def angles(length, head_width, device):
    """Return the cosine and sine of every position's rotation."""
    frequency = 10_000.0 ** (-torch.arange(0, head_width, 2, device=device) / head_width)
    angle = torch.outer(torch.arange(length, device=device), frequency).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(x, rotation):
    """Turn each pair of channels by its position's angle."""
    cosine, sine = rotation
    first, second = x.chunk(2, dim=-1)
    return (x * cosine + torch.cat((-second, first), dim=-1) * sine).to(x.dtype)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128, help="tokens in each of 4 sequences")
    parser.add_argument(
        "--no-fused", action="store_true", help="AdamW tensor by tensor or by lists"
    )
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = TinyLlama(2048, args.width, num_heads=4, num_layers=args.layers).to(device)
    is_fused = device == "cuda" and not args.no_fused
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=is_fused)
    for _ in range(args.steps):
        tokens = torch.randint(2048, (4, args.tokens + 1), device=device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss after {args.steps} steps: {loss.item():.3f}")


if __name__ == "__main__":
    main()
