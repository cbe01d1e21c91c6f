"""LBFGS calls a closure many times in one step, with a model and a backward pass in each."""

# seen: 10

import torch

if torch.cuda.is_available():
    torch.set_default_device("cuda")

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
x, y = torch.randn(16, 4), torch.randn(16, 1)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)
num_calls = 0


def closure():
    global num_calls
    num_calls += 1
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss


for _ in range(10):
    print(optimizer.step(closure).item(), num_calls)
