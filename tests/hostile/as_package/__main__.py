"""A package is run with -m, and imports a part of itself relatively."""

# command: {python} -m as_package --lr 3
# seen: 9

import sys

import torch

from .model import Net

net = Net().eval()
for _ in range(9):
    net(torch.ones(2, 4))
print(sys.argv, __name__, __package__, __spec__.name, sys.path[0], net.inner.weight.shape)
