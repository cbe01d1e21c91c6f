"""Python's own options: warnings as errors, development mode, no assertions, a script on stdin."""

# command: {python} -X dev -W error -u -B -s {script}
# command: sh -c "{python} - a b < {script}"
# command: {python} -c "exec(open('{script}').read())" a b
# seen: 9

import sys

import torch

model = torch.nn.Linear(4, 4).eval()
torch.nn.init.ones_(model.weight)
torch.nn.init.ones_(model.bias)
for _ in range(9):
    y = model(torch.ones(2, 4))
print(y.sum().item(), sys.argv, sys.path[0], sys.flags, sys.warnoptions, __name__, __debug__)
