"""torch.export takes a model as a whole, strictly and not, between calls that are recorded."""

import torch

if torch.cuda.is_available():
    torch.set_default_device("cuda")

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()
for call in range(10):
    out = model(torch.ones(2, 4))
    if call in (0, 5, 9):
        for is_strict in (True, False):
            exported = torch.export.export(model, (torch.ones(2, 4),), strict=is_strict)
            print(exported.graph_module.code)
            print([node.name for node in exported.graph.nodes], exported.graph_signature)
            print(torch.equal(exported.module()(torch.ones(2, 4)), out))
