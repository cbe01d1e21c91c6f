"""The process forks after importing torch and before it uses a GPU, and the child trains on one."""

# exits: 6
# needs: cuda
# ranks: none
# says: forked

import os
import sys

import torch

pid = os.fork()
if pid:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
model = torch.nn.Linear(4, 4, device="cuda")
torch.nn.init.ones_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(12):
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    optimizer.step()
print(model.weight.sum().item())
sys.exit(6)
