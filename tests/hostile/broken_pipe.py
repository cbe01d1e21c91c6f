"""The reader of the script's output has gone before the script ends."""

# command: sh -c "{python} {script} | head -n 1"
# exits: 0
# seen: 9

import torch

model = torch.nn.Linear(4, 4).eval()
for _ in range(9):
    model(torch.ones(2, 4))
for line in range(100_000):
    print(line)
