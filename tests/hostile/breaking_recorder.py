"""The recorder finds a part of itself missing, or of torch: it says so, and the script goes on."""

# command: {python} {script} itself
# command: {python} {script} torch
# says: could not start
# says: failed in
# ranks: none

import sys

if sys.argv[1] == "itself":
    sys.modules["kprof_recorder.settings"] = None

import torch

if sys.argv[1] == "torch":
    torch.profiler.profile.start_trace = None
model = torch.nn.Linear(4, 4).eval()
for _ in range(9):
    model(torch.ones(2, 4))
print("done")
