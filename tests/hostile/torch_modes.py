"""Modes and subclasses of tensors of the script's own see every operation: only its own ones."""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

torch.manual_seed(0)
seen = []


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        seen.append(getattr(function, "__name__", "?"))
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Seeing(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        seen.append("of a subclass")
        return super().__torch_function__(function, types, args, kwargs or {})


model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
model[1].weight = torch.nn.Parameter(torch.ones(4, 4).as_subclass(Seeing))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
with Functions(), Operators():
    for _ in range(9):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
print(len(seen), *seen)
