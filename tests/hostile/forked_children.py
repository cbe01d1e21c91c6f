"""Raw os.fork in every stage of a training; children leave in every way and find no profiler."""

# seen: 12

import atexit
import os
import sys

import torch

atexit.register(lambda: print("atexit", os.getpid() == PARENT, flush=True))
PARENT = os.getpid()
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def leave(how):
    with torch.no_grad():
        model(torch.ones(2, 4))
    if how == 0:
        sys.exit(3)
    if how == 1:
        os._exit(4)
    if how == 2:
        raise ValueError("in the child")
    sys.stdout.write("unflushed ")


for step in range(12):
    if step in (0, 1, 4, 6, 7, 11):
        pid = os.fork()
        if pid == 0:
            leave(step % 4)
            sys.exit()
        print(step, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(model.weight.sum().item())
