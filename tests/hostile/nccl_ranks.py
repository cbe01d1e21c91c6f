"""Ranks on GPUs of their own train with DDP on NCCL, and gather what came of it."""

# command: {python} -m torch.distributed.run --standalone --nproc-per-node 2 {script}
# command: {python} -m torch.distributed.run --standalone --nproc-per-node 4 {script}
# needs: cuda:2
# needs: cuda:4
# ranks: 0 1
# ranks: 0 1 2 3
# seen: 12

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(64, 64).cuda(), device_ids=[rank])
optimizer = torch.optim.AdamW(model.parameters())
for step in range(12):
    loss = model(torch.full((8, 64), rank + step / 12, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.all_reduce(loss)
with open(f"rank{rank}.txt", "w") as file:
    print(loss.item(), model.module.weight.sum().item(), file=file)
dist.destroy_process_group()
