"""concurrent.futures starts processes late, which end when the interpreter does."""

# seen: 9

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import torch


def work(number):
    return torch.full((2, 2), float(number)).sum().item()


if __name__ == "__main__":
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(9):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    executor = ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork"))
    print([future.result() for future in [executor.submit(work, n) for n in range(4)]])
