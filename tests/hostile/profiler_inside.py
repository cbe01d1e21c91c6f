"""torch.profiler of the script's own starts inside a forward, an autograd.Function and ranges."""

# recorded: 5
# seen: 14
# says: The recording ended where the workload started torch's profiler itself

import torch
from torch.profiler import ProfilerActivity, profile, record_function

if torch.cuda.is_available():
    torch.set_default_device("cuda")

torch.manual_seed(0)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, is_profiled):
        with record_function("first"), record_function("second"):
            if not is_profiled:
                return x * 2
            with profile(activities=[ProfilerActivity.CPU]) as mine:
                out = x * 2
            print([event.name for event in mine.events() if event.name.startswith("aten::mul")])
            return out

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x, is_profiled):
        return Doubled.apply(self.inner(x), is_profiled)


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(14):
    model(torch.ones(2, 4), step in (1, 6)).sum().backward()
    optimizer.step()
print(model.inner.weight.sum().item())
