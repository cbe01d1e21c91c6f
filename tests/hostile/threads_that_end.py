"""Every request has a thread of its own, which ends with it, in a process with compiled kernels."""

# command: {python} {script} one
# command: {python} {script} pool
# recorded: 3 of them

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

# As once torch.compile has made a kernel for a GPU.
import torch._inductor.runtime.triton_heuristics

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).to(device).eval()
found = {}


def infer(number):
    with torch.inference_mode():
        found[number] = model(torch.full((2, 4), float(number), device=device)).sum().item()


if sys.argv[1] == "one":
    for number in range(24):
        thread = threading.Thread(target=infer, args=(number,))
        thread.start()
        thread.join()
else:
    together = threading.Barrier(4)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: together.wait(), range(4)))
        list(pool.map(infer, range(400)))
        # Calls that overlap are one step, so that these alone are sure to be some.
        for number in range(12):
            pool.submit(infer, number).result()
print(sorted(found.items()))
