"""multiprocessing pools compute with torch in their workers, between the steps of a training."""

# command: {python} {script} fork
# command: {python} {script} spawn
# seen: 12

import multiprocessing
import sys

import torch


def work(number):
    model = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(model.weight, number)
    torch.nn.init.zeros_(model.bias)
    with torch.no_grad():
        return model(torch.ones(1, 4)).sum().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        for step in range(12):
            print(pool.map(work, range(step, step + 4)))
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    print(model.weight.sum().item(), multiprocessing.active_children())
