"""Every call of the model is in a range and in an operator of the workload, which begin before."""

# command: {python} {script} record_function
# command: {python} {script} Function
# command: {python} {script} decorator
# recorded: 5 6 7
# recorded: 6 7 8
# recorded: 5 6 7

import sys

import torch
from torch.profiler import record_function

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(16, 8)


class Solve(torch.autograd.Function):
    """Calls the model in both directions, as solvers of differential equations do."""

    @staticmethod
    def forward(ctx, start, *parameters):
        return model(start)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            out = model(x)
        return None, *torch.autograd.grad(out, tuple(model.parameters()), gradient)


@record_function("decorated")
def call():
    return model(x)


for _ in range(10):
    optimizer.zero_grad()
    if sys.argv[1] == "record_function":
        with record_function("forward"), record_function("inner"):
            out = model(x)
    elif sys.argv[1] == "Function":
        out = Solve.apply(x, *model.parameters())
    else:
        out = call()
    loss = out.square().mean()
    loss.backward()
    # What lies on the heap is let go and taken again.
    pieces = [bytes(size) for size in range(0, 4000, 8)]
    optimizer.step()
    print(loss.item(), len(pieces))
