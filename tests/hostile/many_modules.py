"""A model of 100,000 modules is called, cast, walked through and forgotten."""

# recorded: no steps
# says: The recording was cut

import gc
import weakref

import torch

model = torch.nn.Sequential(*[torch.nn.Identity() for _ in range(100_000)]).eval()
with torch.no_grad():
    for _ in range(3):
        out = model(torch.ones(2))
alive = weakref.ref(model)
print(out.sum().item(), sum(1 for _ in model.modules()))
del model
print(alive(), gc.isenabled())
