"""The process replaces itself by another Python, amid its training, under the same number."""

# seen: 9

import os
import sys

import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if step == 6 and len(sys.argv) == 1:
        os.execv(sys.executable, [sys.executable, __file__, "again"])
print(sys.argv[1:])
