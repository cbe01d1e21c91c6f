"""Ranks that multiprocessing forks train with DDP on gloo."""

# ranks: none
# says: forked

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel


def train(rank, world_size, store):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    torch.nn.init.ones_(model.module.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(12):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
    with open(f"rank{rank}.txt", "w") as file:
        print(model.module.weight.tolist(), file=file)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = (2, os.path.join(folder, "store"))
        torch.multiprocessing.start_processes(train, arguments, nprocs=2, start_method="fork")
    print("done")
