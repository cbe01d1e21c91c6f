"""A model in a module of its own."""

import torch


class Net(torch.nn.Module):
    """One layer."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        """Call the layer."""
        return self.inner(x)
