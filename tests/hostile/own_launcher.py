"""A launcher starts ranks as Slurm does: nothing of torch.distributed, only variables."""

# ranks: 0 1
# seen: 9

import os
import subprocess
import sys

if "SEED" not in os.environ:
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, "SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": "2", "SEED": rank},
        )
        for rank in ("0", "1")
    ]
    sys.exit(max(rank.wait() for rank in ranks))

import torch

torch.manual_seed(int(os.environ["SEED"]))
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(9):
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
with open(f"rank{os.environ['SEED']}.txt", "w") as file:
    print(model.weight.tolist(), file=file)
