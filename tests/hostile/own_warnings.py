"""Warnings are errors, shown once, recorded or silenced, as the script's own filters say."""

import warnings

import torch

torch.manual_seed(0)


class Warning_(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        warnings.warn("old way", FutureWarning)
        return self.inner(x)


model = Warning_()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    if step == 3:
        warnings.simplefilter("error")
    with warnings.catch_warnings(record=True) if step % 3 == 2 else warnings.catch_warnings():
        try:
            loss = model(torch.ones(2, 4)).sum()
        except FutureWarning as error:
            print("raised", error)
            loss = model.inner(torch.ones(2, 4)).sum()
    loss.backward()
    optimizer.step()
print(loss.item(), [entry[0] for entry in warnings.filters][:2])
