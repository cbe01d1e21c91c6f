"""torch.compile in the modes that capture CUDA graphs or try kernels against each other."""

# command: {python} {script} default
# command: {python} {script} reduce-overhead
# command: {python} {script} max-autotune
# command: {python} {script} max-autotune-no-cudagraphs
# needs: cuda g++
# says: compiled
# seen: 12

import os
import sys
import tempfile

folder = tempfile.TemporaryDirectory()
os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder.name

import torch
from torch._dynamo.utils import counters
from torch._inductor import select_algorithm

# The times of the kernels that race differ in every run.
select_algorithm.PRINT_AUTOTUNE = False

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)
).cuda()
compiled = torch.compile(model, mode=sys.argv[1], fullgraph=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
first = None
for _ in range(12):
    loss = compiled(torch.ones(32, 64, device="cuda")).square().mean()
    first = first or loss.item()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
# Kernels that won a race may differ from run to run, and with them the last bits.
print(loss.item() < first, loss.item() if sys.argv[1] == "default" else "")
print(dict(counters["stats"]), dict(counters["graph_break"]))
