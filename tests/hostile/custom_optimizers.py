"""Optimizers of the script's own: a subclass, and one that torch knows nothing of."""

# command: {python} {script} subclass
# command: {python} {script} foreign
# recorded: 5 6 7
# recorded: 32 33 34

import sys

import torch

if torch.cuda.is_available():
    torch.set_default_device("cuda")

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)


class Signs(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad.sign()
        return "stepped"


class Foreign:
    def __init__(self, parameters):
        self.parameters = list(parameters)

    def step(self):
        for p in self.parameters:
            p.data -= 0.1 * p.grad
        return "foreign"

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None


optimizer = (Signs if sys.argv[1] == "subclass" else Foreign)(model.parameters())
for _ in range(60):
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    told = optimizer.step()
    optimizer.zero_grad()
print(told, loss.item(), model.weight.tolist())
