"""The data come line by line from stdin, to its end."""

# stdin: 0.5 1 2 3
# stdin: 0.25 3 2 1
# seen: 10

import sys

import torch

rows = [[float(word) for word in line.split()] for line in sys.stdin]
model = torch.nn.Linear(4, 1).eval()
torch.nn.init.ones_(model.weight)
torch.nn.init.ones_(model.bias)
for _ in range(5):
    for row in rows:
        y = model(torch.tensor(row))
print(y.item(), sys.stdin.read() == "")
