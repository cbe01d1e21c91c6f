"""A training captures itself into a CUDA graph after its warm-up, and replays it from then on."""

# needs: cuda
# recorded: 3 of them

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).cuda()
optimizer = torch.optim.Adam(model.parameters(), capturable=True)
x, y = torch.randn(32, 64, device="cuda"), torch.randn(32, 8, device="cuda")


def step():
    optimizer.zero_grad(set_to_none=True)
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = step()
for number in range(30):
    x.fill_(number / 30)
    graph.replay()
print(loss.item(), [p.sum().item() for p in model.parameters()])
