"""The folder it runs in is read-only, and so is whatever it may write to there."""

# permissions: 555

import os

import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(9):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
try:
    open("model.pt", "wb")
except OSError as error:
    print(error, os.access(".", os.W_OK))
