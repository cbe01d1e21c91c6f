"""Daemon threads that have called the model are still there when the interpreter ends."""

# recorded: 3 of them

import threading

import torch

model = torch.nn.Linear(4, 4).eval()
for_ever = threading.Event()
ready = threading.Barrier(3)


def infer():
    with torch.no_grad():
        for _ in range(50):
            model(torch.ones(2, 4))
    ready.wait()
    for_ever.wait()


threads = [threading.Thread(target=infer, daemon=True) for _ in range(2)]
for thread in threads:
    thread.start()
ready.wait()
print(sum(thread.is_alive() for thread in threading.enumerate()))
