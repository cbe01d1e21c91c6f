"""A console runs what it reads: it looks whether anybody has replaced Python's hooks."""

# seen: 12

import code
import sys
import threading

CELLS = (
    "import torch",
    "torch.manual_seed(0)\nmodel = torch.nn.Linear(4, 4)",
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
    "def train():\n    model(torch.ones(2, 4)).sum().backward()\n    optimizer.step()\n",
    *["train()"] * 12,
    "1 / 0",
    "model(torch.ones(3, 3))",
    "print(model.weight.sum().item())",
)

console = code.InteractiveInterpreter()
for cell in CELLS:
    console.runsource(cell, "<cell>", "exec")
print(sys.excepthook is sys.__excepthook__, sys.unraisablehook is sys.__unraisablehook__)
print(threading.excepthook is threading.__excepthook__)
