"""The process replaces itself by another Python, amid its steps, under the same number."""

# seen: 9

import os
import sys

import torch

model = torch.nn.Linear(4, 4).eval()
for step in range(9):
    model(torch.ones(2, 4))
    if step == 6 and len(sys.argv) == 1:
        os.execv(sys.executable, [sys.executable, __file__, "again"])
print(sys.argv[1:])
