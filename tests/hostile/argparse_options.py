"""argparse takes options that kprof has as well, and says on stderr when it does not like them."""

# command: {python} {script} --steps 9 --out model.pt --force

import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--out", required=True)
parser.add_argument("--force", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(args.steps):
    model(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
with open(args.out, "wb") as file:
    torch.save(model.state_dict(), file)
print(vars(args), parser.prog)
