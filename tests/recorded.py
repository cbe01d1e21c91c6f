"""Runs a tiny script under the recorder, or bare, and reads back what came of it."""

import gzip
import json
import subprocess
import sys
from dataclasses import dataclass

from kprof.collect.launch import LaunchOptions, launch

# torch for scripts that do little else than start. No garbage is looked for among what it brings,
# neither as it is imported nor at the end. An optimizer's first step would import all of Dynamo,
# which takes as long as torch.
LEAN_TORCH = """
import gc
gc.disable()
import torch
from torch.optim import SGD, AdamW, Optimizer
for name in ("add_param_group", "zero_grad"):
    setattr(Optimizer, name, getattr(Optimizer, name).__wrapped__)
for one in (SGD, AdamW):
    one.step = torch.no_grad()(one.step.__wrapped__)
gc.freeze()
gc.enable()
"""
MODEL = f"""{LEAN_TORCH}
import sys
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = torch.nn.Linear(4, 4)
    def forward(self, x):
        return self.attn(x)
class Llama(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(2))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
    @torch.no_grad()
    def generate(self, x, num):
        for _ in range(num):
            x = self(x)
        return x
model = Llama()
"""


@dataclass(frozen=True)
class Recorded:
    """A run under the recorder: how it ended, and what its one process left."""

    result: object
    description: dict
    events: list

    def ranges(self, prefix):
        """Return the names of kprof's ranges of one sort, sorted, each once."""
        names = {event.get("name", "") for event in self.events}
        return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))

    def count(self, name):
        return sum(event.get("name") == name for event in self.events)

    def recorded_steps(self):
        return [step["index"] for step in self.description["steps"] if step["recorded"]]


def record(folder, script, *arguments, **options):
    path = folder / "script.py"
    path.write_text(script)
    command = (sys.executable, str(path), *arguments)
    return record_command(folder, command, **options)


def record_command(folder, command, **options):
    result = launch(LaunchOptions(tuple(command), folder / "run.kprof", **options))
    if not result.parts:
        return Recorded(result, {}, [])
    description = json.loads((result.parts[0] / "recorder.json").read_text())
    with gzip.open(result.parts[0] / "window-0.json.gz") as file:
        events = json.load(file)["traceEvents"]
    return Recorded(result, description, events)


def run_bare(folder, *arguments):
    return subprocess.run(
        (sys.executable, str(folder / "script.py"), *arguments), capture_output=True, check=False
    )


def recorded_part(raw, number, **said):
    """Make the part of a process that never was, which says what `said` says."""
    part = raw / f"rank0-pid{number}"
    part.mkdir(parents=True)
    recorder = {"pid": number, "started_by": None, "num_steps_seen": 0, "world_size": 1}
    recorder |= {"problems": [], "device_name": None, **said}
    (part / "recorder.json").write_text(json.dumps(recorder))
    return part
