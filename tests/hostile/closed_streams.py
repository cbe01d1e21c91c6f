"""stdin, stdout and stderr are closed from the beginning; files opened take their numbers."""

# streams: closed
# seen: 9

import sys

import torch

model = torch.nn.Linear(4, 4).eval()
with open("found.txt", "w") as file:
    for _ in range(9):
        model(torch.ones(2, 4))
    print(sys.stdin, sys.stdout, sys.stderr, file=file)
print("nobody reads this")
