"""A server of gevent's greenlets trains in them: random numbers come in the order of its code."""

# command: {python} {script} before
# command: {python} {script} after
# needs: gevent
# recorded: 3 of them

import sys
import warnings

if sys.argv[1] == "before":
    from gevent import monkey

    monkey.patch_all()

import torch

if sys.argv[1] == "after":
    from gevent import monkey

    warnings.simplefilter("ignore")
    monkey.patch_all()

import subprocess
import threading
import time

import gevent
from gevent.pool import Pool
from gevent.server import StreamServer
from gevent.socket import create_connection

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_default_device(device)
torch.manual_seed(0)
small = torch.nn.Linear(4, 4).eval()
order = []


def train(name, num_steps):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(num_steps):
        loss = model(torch.randn(2, 4, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        order.append((name, step, loss.item()))
        if step % 4 == 3:
            time.sleep(0)
    return loss.item()


class Waiting(torch.nn.Module):
    def forward(self, x):
        gevent.sleep(0)
        return small(x)


waiting = Waiting().eval()


def answer(connection, address):
    number = int(connection.recv(9))
    with torch.no_grad():
        found = waiting(torch.full((2, 4), float(number), device=device)).sum().item()
    connection.sendall(repr(found).encode())
    connection.close()


def request(number):
    with create_connection(server.address) as connection:
        connection.sendall(str(number).encode())
        return connection.recv(99)


trainings = [gevent.spawn(train, name, 12) for name in "ab"]
gevent.joinall(trainings)
print([training.value for training in trainings], order)
server = StreamServer(("127.0.0.1", 0), answer)
server.start()
print(Pool(8).map(request, range(8)))
server.stop()
thread = threading.Thread(target=train, args=("c", 12))
thread.start()
thread.join()
print(order[-1], subprocess.run(("echo", "7"), stdout=subprocess.PIPE).stdout)
print(threading.active_count(), [thread.name for thread in threading.enumerate()])
