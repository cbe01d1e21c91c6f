"""Pythons that take no notice of PYTHONPATH or of sitecustomize: kprof says that none reported."""

# command: {python} -I {script}
# command: {python} -E -c "print('outside')"
# command: {python} -S -c "import sys; print(sys.flags.no_site)"
# command: sh -c "echo no Python at all"
# ranks: none
# says: No process reported a recording

import sys

import torch

model = torch.nn.Linear(4, 4).eval()
for _ in range(9):
    model(torch.ones(2, 4))
print(sys.flags.isolated, sys.flags.ignore_environment)
