"""torchrun starts two ranks of DDP or FSDP2 on gloo, whose loaders spawn workers."""

# command: {python} -m torch.distributed.run --standalone --nproc-per-node 2 {script} ddp
# command: {python} -m torch.distributed.run --standalone --nproc-per-node 2 {script} fsdp
# ranks: 0 1
# seen: 12

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


def shard(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    model = DistributedDataParallel(model) if sys.argv[1] == "ddp" else shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    data = [torch.full((4,), float(rank + number)) for number in range(12)]
    with open(f"rank{rank}.txt", "w") as file:
        workers = {"num_workers": 1, "multiprocessing_context": "spawn"}
        for batch in DataLoader(data, **(workers if sys.argv[1] == "ddp" else {})):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(loss.item(), file=file)
    dist.destroy_process_group()
