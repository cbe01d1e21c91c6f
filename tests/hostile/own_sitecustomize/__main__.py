"""A sitecustomize of the script's own, which imports torch, as a company's image may have one."""

# environment: PYTHONPATH=own_sitecustomize/site
# seen: 9

import os
import sys

import torch

model = torch.nn.Linear(4, 4).eval()
for _ in range(9):
    model(torch.ones(2, 4))
print(os.environ["CUSTOMIZED"], sys.modules["sitecustomize"].__file__, sys.path[:2])
