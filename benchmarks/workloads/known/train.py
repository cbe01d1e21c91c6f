"""Train a small causal transformer the slow way: what `ab_known.py` compares changes of.

Attention by its formula, an optimizer that updates tensor by tensor, nothing compiled;
`changes.py` beside it switches each of the three to the fast way.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

attention = SDPBackend.MATH


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each after a norm and around a residual."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=1_000_000)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--tokens", type=int, default=2048)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--fused", action="store_true", help="the optimizer in one kernel")
args = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(*(Block(args.width, args.width // 64) for _ in range(args.layers)))
model.to(device, torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False, fused=args.fused)
x = torch.randn(args.batch, args.tokens, args.width, device=device, dtype=torch.bfloat16)
for _ in range(args.steps):
    with sdpa_kernel(attention):
        loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
