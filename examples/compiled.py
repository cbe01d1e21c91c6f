"""Train a net that torch.compile has rewritten.

On a GPU the kernels are the compiler's own, with names like `triton_poi_fused_…`. On a machine
without one the graph is captured all the same, but runs as it is: that needs no C++ compiler.

Profile it:  kprof run examples/compiled.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class GatedLayer(nn.Module):
    """A gated feed-forward layer: many small operators that a compiler can fuse."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, 4 * width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        x_normed = self.norm(x)
        return x + self.down(F.silu(self.gate(x_normed)) * self.up(x_normed))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=128)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = nn.Sequential(*(GatedLayer(args.width) for _ in range(args.layers))).to(device)
    compiled = torch.compile(model, backend="inductor" if device == "cuda" else "aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(args.steps):
        x = torch.randn(args.batch, args.width, device=device)
        loss = F.mse_loss(compiled(x), x.roll(1, dims=0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss after {args.steps} steps: {loss.item():.3f}")


if __name__ == "__main__":
    main()
