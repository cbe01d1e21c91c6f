"""Train an 8-layer transformer that torch.compile has rewritten, in bf16."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

FULL = {"layers": 8, "width": 1024, "heads": 16, "tokens": 1024, "batch": 8}
TINY = {"layers": 2, "width": 64, "heads": 4, "tokens": 16, "batch": 2}
VOCABULARY = 32_000


class Block(nn.Module):
    """A causal transformer layer with a gated feed-forward part."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 8 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.gate_up(self.feed_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def build_model(size):
    return nn.Sequential(
        nn.Embedding(VOCABULARY, size["width"]),
        *(Block(size["width"], size["heads"]) for _ in range(size["layers"])),
        nn.RMSNorm(size["width"]),
        nn.Linear(size["width"], VOCABULARY, bias=False),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    args = parser.parse_args()

    size = TINY if args.tiny else FULL
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = build_model(size).to(device, torch.bfloat16)
    compiled = torch.compile(model, backend="inductor" if device == "cuda" else "aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for _ in range(args.steps):
        tokens = torch.randint(VOCABULARY, (size["batch"], size["tokens"]), device=device)
        logits = compiled(tokens)[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss after {args.steps} steps: {loss.item():.3f}")


if __name__ == "__main__":
    main()
