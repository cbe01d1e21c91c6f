"""Models, optimizers and classes are copied, pickled, saved and looked at."""

# recorded: 8 9 10

import copy
import hashlib
import inspect
import io
import pickle

import torch

if torch.cuda.is_available():
    torch.set_default_device("cuda")

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1))
optimizer = torch.optim.Adam(model.parameters())
for step in range(20):
    if step in (2, 6):
        model = copy.deepcopy(model)
        state = optimizer.state_dict()
        optimizer = torch.optim.Adam(model.parameters())
        optimizer.load_state_dict(state)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
saved = io.BytesIO()
torch.save({"model": model, "optimizer": optimizer.state_dict()}, saved)
print(hashlib.sha256(saved.getvalue()).hexdigest())
print([p.tolist() for p in pickle.loads(pickle.dumps(model)).parameters()])
for thing in (torch.nn.Module.__call__, model.forward, optimizer.step, torch.autograd.backward):
    print(thing.__name__, thing.__qualname__, thing.__module__, inspect.signature(thing))
print(sorted(vars(model)), sorted(vars(optimizer)), sorted(vars(torch.optim.Adam)))
