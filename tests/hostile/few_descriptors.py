"""The script has used up its file descriptors by the time the recording is to be written."""

# ranks: none
# says: too many open files

import os
import resource

import torch

if torch.cuda.is_available():
    torch.set_default_device("cuda")

model = torch.nn.Linear(4, 4).eval()
for _ in range(3):
    model(torch.ones(2, 4))
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError as error:
    print(error.strerror)
for _ in range(12):
    model(torch.ones(2, 4))
print(len(held) > 20)
