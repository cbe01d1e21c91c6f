"""Three models work together, one of them frozen, with an evaluation between the epochs."""

# recorded: 7 8 9
# seen: 17

import torch

if torch.cuda.is_available():
    torch.set_default_device("cuda")

torch.manual_seed(0)
encoder, head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)
frozen = torch.nn.Linear(4, 8).requires_grad_(False).eval()
optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1)
for _ in range(3):
    for _ in range(6):
        loss = head(encoder(frozen(torch.randn(2, 4)))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    head.eval()
    with torch.inference_mode():
        print([head(encoder(frozen(torch.ones(1, 4)))).sum().item() for _ in range(3)])
    head.train()
print(loss.item())
