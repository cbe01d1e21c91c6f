"""Copies from pinned memory, and two models, on streams of their own that wait for each other."""

# needs: cuda
# seen: 12

import torch

torch.manual_seed(0)
first, second = torch.nn.Linear(256, 256).cuda(), torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
copying, computing = torch.cuda.Stream(), torch.cuda.Stream()
batches = [torch.randn(64, 256).pin_memory() for _ in range(12)]
for batch in batches:
    with torch.cuda.stream(copying):
        x = batch.to("cuda", non_blocking=True)
    computing.wait_stream(copying)
    with torch.cuda.stream(computing):
        x.record_stream(computing)
        loss = second(first(x).relu()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.current_stream().wait_stream(computing)
torch.cuda.synchronize()
print(loss.item(), torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())
