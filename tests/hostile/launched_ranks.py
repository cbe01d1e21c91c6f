"""Launchers of others start the ranks, each with agents and variables of its own."""

# command: srun --quiet --ntasks 2 --overcommit {python} {script}
# command: {python} -m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no --main_process_port 0 {script}
# command: env DS_ACCELERATOR=cpu {python} -m deepspeed.launcher.runner --num_accelerators 2 --master_port 0 --log_level error {script}
# needs: srun
# needs: accelerate
# needs: deepspeed
# ranks: 0 1
# seen: 9

import os

import torch

rank = int(os.environ.get("RANK") or os.environ["SLURM_PROCID"])
torch.manual_seed(rank)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(9):
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
with open(f"rank{rank}.txt", "w") as file:
    print(model.weight.tolist(), file=file)
