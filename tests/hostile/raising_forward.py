"""A model raises inside its forward: caught and printed, in a thread, and at last SIGINT comes inside it."""

# exits: 130

import logging
import signal
import sys
import threading
import traceback

import torch

if torch.cuda.is_available():
    torch.set_default_device("cuda")


class Failing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x, how="none"):
        if how == "error":
            raise ValueError("no")
        if how == "interrupt":
            signal.raise_signal(signal.SIGINT)
        return self.inner(x)


model = Failing().eval()
for step in range(10):
    model(torch.ones(2, 4))
    if step in (1, 6, 9):
        try:
            model(torch.ones(2, 4), "error")
        except ValueError as error:
            traceback.print_exc()
            logging.exception("step %s", step)
            names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            print(names, file=sys.stderr)
thread = threading.Thread(target=model, args=(torch.ones(2, 4), "error"), name="Failing")
thread.start()
thread.join()
model(torch.ones(2, 4), "interrupt")
