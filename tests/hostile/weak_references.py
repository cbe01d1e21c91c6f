"""Models, optimizers and tensors go when the script lets them go, not when the collector comes."""

import gc
import sys
import weakref

import torch

if torch.cuda.is_available():
    torch.set_default_device("cuda")

gc.disable()


def train():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(9):
        x = torch.ones(2, 4)
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
    print([sys.getrefcount(thing) for thing in (model, model[0], optimizer, x, loss)])
    return [weakref.ref(thing) for thing in (model, model[0], x, model[0].weight)]


for _ in range(2):
    print([reference() is None for reference in train()])
print(gc.isenabled(), gc.garbage, gc.callbacks)
