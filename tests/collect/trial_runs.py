"""Runs a tiny script in a trial, with patches to switch on and off."""

import sys

from kprof.collect.trials import Schedule, Variant, run_trial
from tests.recorded import LEAN_TORCH

MODEL = f"""{LEAN_TORCH}
import sys, time
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
def serve(num_calls):
    model.eval()
    with torch.no_grad():
        for _ in range(num_calls): model(torch.ones(1, 4))
def train(num_steps):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(num_steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
PATCH = """
import contextlib, sys, time, torch
ORIGINAL = torch.nn.ReLU.forward
def slow_forward(self, x):
    time.sleep(0.02)
    return ORIGINAL(self, x)
@contextlib.contextmanager
def slow():
    torch.nn.ReLU.forward = slow_forward
    try:
        yield
    finally:
        torch.nn.ReLU.forward = ORIGINAL
@contextlib.contextmanager
def failing():
    def fail(self, x):
        raise ValueError("only in B")
    torch.nn.ReLU.forward = fail
    yield
def refusing():
    raise KeyError("no such kernel")
@contextlib.contextmanager
def generating():
    writer = sys.modules["__main__"].Writer
    before = writer.generate
    writer.generate = lambda self, x: self(x)
    yield
    writer.generate = before
@contextlib.contextmanager
def stepping():
    optimizer = sys.modules["__main__"].optimizer
    optimizer.step = lambda: None
    yield
    del optimizer.step
@contextlib.contextmanager
def slow_anew():
    with slow():
        torch.compiler.reset()
        yield
    torch.compiler.reset()
@contextlib.contextmanager
def slow_step():
    before = torch.optim.AdamW.step
    def step(optimizer):
        time.sleep(0.02)
        return before(optimizer)
    torch.optim.AdamW.step = step
    yield
    torch.optim.AdamW.step = before
class Sgd:
    def __enter__(self):
        self.before = torch.optim.AdamW.step
        torch.optim.AdamW.step = lambda optimizer: None
    def __exit__(self, *error):
        torch.optim.AdamW.step = self.before
"""
SHORT = {"skip": 2, "window_s": 0.01}


def never(windows):
    return False


def run(folder, script, letters="AA", is_enough=never, most_s=60, command=None, **schedule):
    (folder / "script.py").write_text(script)
    (folder / "patch.py").write_text(PATCH)
    if "patch" in schedule:
        schedule["patch"] = f"{folder}/patch.py:{schedule['patch']}"
    variant = Variant("A", command or (sys.executable, str(folder / "script.py")))
    plan = Schedule(letters, **{**SHORT, **schedule})
    return run_trial(variant, plan, folder / "trial", is_enough=is_enough, most_s=most_s)


WRITER = """
class Writer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model
    def forward(self, x):
        return self.model(x)
    def generate(self, x):
        for _ in range(3):
            x = self(x)
        return x
writer = Writer().eval()
while True:
    writer.generate(torch.ones(1, 4))
"""
