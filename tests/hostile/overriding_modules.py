"""Modules override what everybody relies on: call, attributes, equality, hash, length, class."""

import torch

torch.manual_seed(0)


class Odd(torch.nn.Linear):
    __hash__ = torch.nn.Module.__hash__

    def __call__(self, x):
        return super().__call__(x) + 1

    def __getattr__(self, name):
        if name.startswith(("kprof", "_kprof", "generate")):
            raise RuntimeError(f"nobody has {name}")
        return super().__getattr__(name)

    def __eq__(self, other):
        raise RuntimeError("compared")

    def __bool__(self):
        raise RuntimeError("asked whether it is true")

    def __len__(self):
        raise RuntimeError("measured")

    def __repr__(self):
        raise RuntimeError("shown")


class Parts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.odd = Odd(4, 4)
        self.normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4))
        self.lazy = torch.nn.LazyLinear(4)
        self.same = self.odd
        self.none = None

    def forward(self, x):
        return self.lazy(self.normed(self.same(self.odd(x))))

    def parameters(self, recurse=True):
        yield from torch.nn.Module.parameters(self, recurse)


model = Parts()
model(torch.ones(1, 4))
optimizer = torch.optim.SGD([p for m in (model.odd, model.lazy) for p in m.parameters()], lr=0.01)
for _ in range(12):
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item(), [p.sum().item() for p in model.parameters()])
