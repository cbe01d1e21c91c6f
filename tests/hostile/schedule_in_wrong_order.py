"""A scheduler steps before its optimizer, of which torch warns: its warning stays as it is."""

import torch

if torch.cuda.is_available():
    torch.set_default_device("cuda")

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
for _ in range(9):
    schedule.step()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print(optimizer.step.__name__, type(optimizer.step).__name__, schedule.get_last_lr())
