"""A script can leave in many ways, each with its own exit code and last words."""

# command: {python} {script} 300
# command: {python} {script} raise
# command: {python} {script} _exit
# exits: 44
# exits: 1
# exits: 5

import os
import sys

import torch

if torch.cuda.is_available():
    torch.set_default_device("cuda")

torch.manual_seed(0)
model = torch.nn.Linear(4, 4).eval()
for _ in range(9):
    model(torch.ones(2, 4))
print(model.weight.sum().item(), flush=True)
how = sys.argv[1]
if how.isdigit():
    sys.exit(int(how))
if how == "raise":
    try:
        model(torch.ones(2, 5))
    except RuntimeError as error:
        raise KeyError("what came of it") from error
if how == "_exit":
    os._exit(5)
