"""The process forks right after importing torch, and the child does all the work."""

# exits: 6
# ranks: none
# says: forked

import os
import sys

import torch

pid = os.fork()
if pid:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
model = torch.nn.Linear(4, 4)
torch.nn.init.ones_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(12):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print(model.weight.sum().item())
sys.exit(6)
