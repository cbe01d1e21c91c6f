"""The GPU fails under the script, after its steps: nothing on it can be asked any more."""

# needs: cuda
# exits: 1

import torch

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(12):
    model(torch.ones(2, 64, device="cuda")).sum().backward()
    optimizer.step()
torch.cuda.synchronize()
print(model.weight.shape, flush=True)
# An index outside the table stops the kernel, and with it the context.
model.weight[torch.tensor([1_000_000], device="cuda")]
torch.cuda.synchronize()
