"""Functions registered with atexit, before and after torch, run in their order and use torch."""

# recorded: 5 6 7

import atexit
import sys


@atexit.register
def last():
    with torch.no_grad():
        print("last", model(torch.ones(1, 4)).sum().item(), "torch" in sys.modules)


import torch

if torch.cuda.is_available():
    torch.set_default_device("cuda")

model = torch.nn.Linear(4, 4)
torch.nn.init.ones_(model.weight)
torch.nn.init.ones_(model.bias)


@atexit.register
def failing():
    model(torch.ones(1, 5))


@atexit.register
def first():
    with torch.no_grad():
        print("first", model(torch.ones(1, 4)).sum().item())


optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for _ in range(9):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
