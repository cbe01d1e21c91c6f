"""Forked children are ended by SIGTERM, of their own and of multiprocessing."""

# seen: 8

import multiprocessing
import os
import signal
import time

import torch


def wait(pipe):
    pipe.send(signal.getsignal(signal.SIGTERM))
    time.sleep(60)


if __name__ == "__main__":
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        if step in (0, 4, 7):
            here, there = multiprocessing.Pipe()
            process = multiprocessing.get_context("fork").Process(target=wait, args=(there,))
            process.start()
            print(here.recv())
            process.terminate()
            process.join()
            print(process.exitcode)
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    if os.fork() == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
