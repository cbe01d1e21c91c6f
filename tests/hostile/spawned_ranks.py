"""torch.multiprocessing.spawn starts the ranks of a DDP training on gloo."""

# ranks: 0 1
# seen: 12

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel


def train(rank, world_size, store):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world_size)
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(12):
        loss = model(torch.randn(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
    with open(f"rank{rank}.txt", "w") as file:
        print(loss.item(), model.module.weight.tolist(), file=file)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, (2, os.path.join(folder, "store")), nprocs=2)
    print("done", file=sys.stderr)
