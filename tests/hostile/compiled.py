"""torch.compile with no graph break allowed: not one more graph, guard or entry of a cache."""

# needs: g++
# says: compiled
# seen: 10

import os
import tempfile

folder = tempfile.TemporaryDirectory()
os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder.name

import torch
from torch._dynamo.utils import counters
from torch._inductor import config

# Whether to pad a product is decided by a race, which may end otherwise in every run.
config.shape_padding = False

if torch.cuda.is_available():
    torch.set_default_device("cuda")

torch.manual_seed(0)
torch._logging.set_logs(recompiles=True, graph_breaks=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
compiled = torch.compile(model, backend="inductor", fullgraph=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    loss = compiled(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item(), [p.sum().item() for p in model.parameters()])
print(sorted((key, dict(count)) for key, count in counters.items()))
