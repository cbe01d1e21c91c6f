"""A server's threads outlive the main thread, which ends before any of them has begun to work."""

# command: {python} {script} thread
# command: {python} {script} pool
# command: {python} {script} exits
# recorded: 3 of them
# exits: 0
# exits: 0
# exits: 3

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
torch.set_default_device(device)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


main_ends = threading.Event()


def train(num_steps):
    main_ends.wait()
    if sys.argv[1] != "pool":
        threading.main_thread().join()
    for _ in range(num_steps):
        loss = model(torch.ones(2, 4, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(loss.item(), sorted(thread.name for thread in threading.enumerate()), flush=True)


if sys.argv[1] == "pool":
    ThreadPoolExecutor(1).submit(train, 12)
else:
    threading.Thread(target=train, args=(12,)).start()
print("main ends", flush=True)
main_ends.set()
if sys.argv[1] == "exits":
    sys.exit(3)
