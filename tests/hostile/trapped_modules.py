"""A model notes who looks at it, and holds what is no module."""

# seen: 9

import torch

torch.manual_seed(0)
seen = set()


class Trap(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self._modules["no module"] = object()

    def __getattr__(self, name):
        seen.add(name)
        return super().__getattr__(name)

    def __setattr__(self, name, value):
        seen.add(f"{name} =")
        super().__setattr__(name, value)

    def named_modules(self, *args, **options):
        raise RuntimeError("named_modules")

    def __dir__(self):
        raise RuntimeError("dir")

    def forward(self, x):
        return self.inner(x)


model = Trap()
optimizer = torch.optim.SGD(model.inner.parameters(), lr=0.1)
for _ in range(9):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print(sorted(seen), model.inner.weight.sum().item())
