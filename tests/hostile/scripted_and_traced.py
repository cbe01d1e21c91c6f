"""torch.jit scripts, traces and freezes a model amid its calls, and torch.fx traces it."""

# seen: 13

import warnings

import torch

if torch.cuda.is_available():
    torch.set_default_device("cuda")

warnings.simplefilter("ignore", DeprecationWarning)
torch.manual_seed(0)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x).relu() if x.shape[0] > 1 else self.inner(x)


model = Net().eval()
for call in range(10):
    with torch.no_grad():
        out = model(torch.ones(2, 4))
    if call in (1, 6, 9):
        scripted = torch.jit.script(model)
        traced = torch.jit.trace(model, torch.ones(2, 4))
        print(scripted.code, traced.code, torch.jit.freeze(scripted).code)
        print(torch.equal(traced(torch.ones(2, 4)), out), out.sum().item())
        print(torch.fx.symbolic_trace(torch.nn.Sequential(model.inner, torch.nn.ReLU())).code)
