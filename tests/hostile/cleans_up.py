"""The script deletes every run of kprof that it finds, its own included."""

# ranks: none
# says: deleted while the workload ran

import os
import shutil

import torch

model = torch.nn.Linear(4, 4).eval()
for step in range(12):
    model(torch.ones(2, 4))
    if step in (4, 10):
        shutil.rmtree(os.environ.get("KPROF_RAW", "nowhere"), ignore_errors=True)
print(model.weight.shape)
