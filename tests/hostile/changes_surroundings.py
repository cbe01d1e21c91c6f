"""The script changes its folder, sys.path, sys.argv, its environment, umask and encoding."""

# seen: 9

import builtins
import os
import subprocess
import sys
import time

import torch

os.mkdir("elsewhere")
os.chdir("elsewhere")
os.umask(0o077)
os.environ.clear()
sys.path[:] = [entry for entry in sys.path if entry]
sys.argv[:] = []
sys.stdout.reconfigure(encoding="utf-16")
time.time = time.perf_counter_ns = lambda: 0
builtins.open = None
model = torch.nn.Linear(4, 4)
torch.nn.init.ones_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(9):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print(model.weight.sum().item(), os.listdir(), sys.path_hooks == [], flush=True)
print(subprocess.run([sys.executable, "-c", "pass"]).returncode)
