"""The script looks at the handlers it has, sets and restores them, and is ended by a signal."""

# command: {python} {script} SIGTERM
# command: {python} {script} SIGINT
# command: {python} {script} SIGKILL
# exits: 143
# exits: 130 or 1
# exits: 137

# (What torch executes at its end with a GPU lets Python forget that it was an interrupt: 1.)

import os
import signal
import sys

import torch

if torch.cuda.is_available():
    torch.set_default_device("cuda")

number = signal.Signals[sys.argv[1]]
print(signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1))
before = signal.signal(signal.SIGTERM, lambda *_: print("term", flush=True))
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    if step == 3:
        os.kill(os.getpid(), signal.SIGTERM)
        model(torch.ones(2, 4))
        print(before, signal.signal(signal.SIGTERM, before) is before)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print(signal.getsignal(signal.SIGTERM), flush=True)
os.kill(os.getpid(), number)
model(torch.ones(2, 4))
