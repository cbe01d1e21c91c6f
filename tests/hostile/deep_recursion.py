"""Modules within modules, 152 of them, of which each takes four of Python's 1,000 frames."""

# seen: 9

import sys

import torch


class Nested(torch.nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.inner = Nested(depth - 1) if depth else torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x)


def descend(depth):
    try:
        return descend(depth + 1)
    except RecursionError:
        return depth


torch.manual_seed(0)
model = Nested(150).eval()
torch.nn.init.ones_(next(model.parameters()))
with torch.no_grad():
    for _ in range(9):
        out = model(torch.ones(1, 4))
print(out.std().item(), sys.getrecursionlimit(), descend(0))
