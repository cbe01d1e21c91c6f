"""SIGTERM comes amid the recorded steps: what was recorded until then is kept."""

# exits: 143
# recorded: 5 6
# says: the script ended within the window

import os
import signal

import torch

if torch.cuda.is_available():
    torch.set_default_device("cuda")

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    model(torch.ones(2, 4)).sum().backward()
    if step == 7:
        print("now", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
    optimizer.step()
