"""Threads train and infer at once, and one goes on after the main thread has ended."""

# recorded: 3 of them

import threading

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_default_device(device)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
small = torch.nn.Linear(4, 4).eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
found = {}
fetched = threading.Barrier(3)


def infer(number):
    with torch.no_grad():
        for _ in range(40):
            found[number] = small(torch.full((2, 4), float(number), device=device)).sum().item()
    fetched.wait()


def train(num_steps):
    for _ in range(num_steps):
        loss = model(torch.ones(2, 4, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def train_on():
    fetched.wait()
    threading.main_thread().join()
    print(train(8), threading.active_count())


threads = [threading.Thread(target=infer, args=(number,)) for number in range(2)]
for thread in [*threads, threading.Thread(target=train_on)]:
    thread.start()
print(train(4))
for thread in threads:
    thread.join()
print(sorted(found.items()), sorted(thread.name for thread in threading.enumerate()))
