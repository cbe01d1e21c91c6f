"""Four backward passes make one step, and the learning rate follows a schedule."""

# seen: 9

import torch

if torch.cuda.is_available():
    torch.set_default_device("cuda")

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
for micro in range(36):
    loss = model(torch.randn(2, 4)).square().mean() / 4
    loss.backward()
    if micro % 4 == 3:
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
print(loss.item(), schedule.get_last_lr(), model.weight.tolist())
