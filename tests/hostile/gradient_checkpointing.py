"""Checkpoints, of both kinds, call modules again in the backward pass; dropout must agree."""

# seen: 12

import torch
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

if torch.cuda.is_available():
    torch.set_default_device("cuda")

torch.manual_seed(0)
layers = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)) for _ in range(4)]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, x, is_reentrant):
        x = checkpoint(self.layers[0], x, use_reentrant=is_reentrant)
        return checkpoint_sequential(self.layers[1:], 2, x, use_reentrant=is_reentrant)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    loss = model(torch.ones(2, 4, requires_grad=True), step % 2 == 0).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
