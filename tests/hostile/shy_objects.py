"""A model and an optimizer that cannot be looked at: kprof gives up, and the script goes on."""

# command: {python} {script} model
# command: {python} {script} optimizer
# ranks: none
# says: could not be described

import sys

import torch

torch.manual_seed(0)


class Shy(torch.nn.Linear):
    @property
    def training(self):
        raise RuntimeError("nobody may know")

    @training.setter
    def training(self, value):
        pass


class ShySGD(torch.optim.SGD):
    hides = False

    def __getattribute__(self, name):
        if name == "param_groups" and object.__getattribute__(self, "hides"):
            raise RuntimeError("nobody may know")
        return super().__getattribute__(name)

    def step(self):
        self.hides = False
        super().step()
        self.hides = True


is_model = sys.argv[1] == "model"
model = (Shy if is_model else torch.nn.Linear)(4, 4)
optimizer = (torch.optim.SGD if is_model else ShySGD)(model.parameters(), lr=0.1)
for _ in range(9):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print(model.weight.sum().item())
