"""The folder it runs in is read-only, and so is whatever it may write to there."""

# permissions: 555

import os

import torch

model = torch.nn.Linear(4, 4).eval()
for _ in range(9):
    model(torch.ones(2, 4))
try:
    open("model.pt", "wb")
except OSError as error:
    print(error, os.access(".", os.W_OK))
