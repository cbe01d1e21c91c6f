"""No file may grow beyond some bytes, as on a full disk: kprof says what is lost, and why."""

# ranks: none
# says: could not be written

import resource

import torch

if torch.cuda.is_available():
    torch.set_default_device("cuda")

resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, 8_000))
model = torch.nn.Linear(4, 4).eval()
for _ in range(20):
    model(torch.ones(2, 4))
try:
    with open("weights.bin", "wb") as file:
        file.write(bytes(10_000))
except OSError as error:
    print(error)
