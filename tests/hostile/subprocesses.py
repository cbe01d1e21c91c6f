"""The script starts other Pythons, with torch and without, and reads what they say."""

# seen: 9

import subprocess
import sys

import torch

if torch.cuda.is_available():
    torch.set_default_device("cuda")

HELPER = """
import sys
import torch
print(torch.ones(2, 2).sum().item(), sys.argv, sys.path[0] == "")
print("warned", file=sys.stderr)
sys.exit(3)
"""


def run(*words, **options):
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, **options)
    print(done.returncode, done.stdout, done.stderr)


model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if step == 5:
        run("-c", HELPER, "a b")
run("-I", "-c", "import sys; print(sys.flags.isolated)")
run("-c", "import sys; print(len(sys.modules) > 0, 'torch' in sys.modules)")
run("-c", "import os; print(sorted(os.environ))", env={"LC_ALL": "C.UTF-8"})
