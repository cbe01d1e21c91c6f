"""Handlers of the script's own for SIGTERM, SIGINT, SIGALRM and SIGUSR1, amid its steps."""

# exits: 9
# seen: 11

import faulthandler
import os
import signal
import sys

import torch

if torch.cuda.is_available():
    torch.set_default_device("cuda")

seen = []


def note(number, frame):
    seen.append((step, signal.Signals(number).name))


def leave(number, frame):
    print(seen, flush=True)
    sys.exit(9)


faulthandler.enable()
print([signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)])
print(signal.signal(signal.SIGTERM, leave))
for number in (signal.SIGALRM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, note)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    os.kill(os.getpid(), (signal.SIGALRM, signal.SIGUSR1, signal.SIGINT)[step % 3])
    model(torch.ones(2, 4)).sum().backward()
    if step == 11:
        os.kill(os.getppid() if len(sys.argv) > 1 else os.getpid(), signal.SIGTERM)
    optimizer.step()
