"""sys.settrace counts the lines of the script, as debuggers and coverage tools do."""

# seen: 9

import sys
from collections import Counter

import torch

lines, frames = Counter(), Counter()


def trace(frame, event, argument):
    if frame.f_code.co_filename != __file__:
        return None
    (lines if event == "line" else frames)[frame.f_lineno] += 1
    return trace


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x) + 1


def train():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(9):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


sys.settrace(trace)
train()
sys.settrace(None)
print(sorted(lines.items()), sorted(frames.items()))
