"""Inference only, with and without eval(), of a model that might just as well train."""

# command: {python} {script} eval
# command: {python} {script} train
# seen: 12

import sys

import torch

if torch.cuda.is_available():
    torch.set_default_device("cuda")

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
if sys.argv[1] == "eval":
    model.eval()
for _ in range(12):
    out = model(torch.ones(2, 4))
print(out.tolist(), out.requires_grad)
