"""A model trained with DDP, in which one rank is late to the collectives, if it is asked to be.

    torchrun --standalone --nproc-per-node 2 late_ranks.py --late 1 --by sleep

Nothing here knows of kprof; `stragglers.py` runs it under it.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 24
LATE_S = 0.006
HAS_GPU = torch.cuda.is_available()
WIDTH, ROWS, LAYERS = (4096, 8192, 8) if HAS_GPU else (32, 16, 2)
# About as long as the sleep, on an H100.
EXTRA_PRODUCTS = 14


def is_late(which, rank, step):
    """Tell whether a rank is late in a step: always the same, each in turn, or none."""
    if which == "turn":
        return rank == step % dist.get_world_size()
    return which == str(rank)


def main():
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--late", default="none", help="a rank, turn, or none")
    parser.add_argument("--by", default="sleep", help="sleep, or work")
    args = parser.parse_args()
    dist.init_process_group("nccl" if HAS_GPU else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if HAS_GPU else "cpu"
    if HAS_GPU:
        torch.cuda.set_device(device)
    dtype = torch.bfloat16 if HAS_GPU else torch.float32
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers).to(device, dtype)
    model = DistributedDataParallel(model, device_ids=[rank] if HAS_GPU else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(ROWS, WIDTH, device=device, dtype=dtype)
    extra = torch.randn(WIDTH, WIDTH, device=device, dtype=dtype)
    for step in range(STEPS):
        if is_late(args.late, rank, step):
            if args.by == "sleep":
                time.sleep(LATE_S)
            else:
                for _ in range(EXTRA_PRODUCTS):
                    x @ extra
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # As a log of every step does: the host has no head start that would hide its sleep.
        loss.item()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
