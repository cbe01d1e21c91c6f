"""One rank of torchrun fails amid the training; its agent ends the other by SIGTERM."""

# command: {python} -m torch.distributed.run --standalone --nproc-per-node 2 {script}
# exits: 1
# ranks: 0 1

import os
import time

import torch

rank = int(os.environ["RANK"])
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
if rank == 1:
    while not os.path.exists("ready"):
        time.sleep(0.01)
    os._exit(7)
open("ready", "w").close()
time.sleep(60)
