"""What recording costs on the host: torch's profiler, kprof's ranges on top, and kprof at rest.

    python benchmarks/recording_cost.py

Every figure comes from fresh processes, which call 257 modules a step: modules that do nothing, so
that only the call itself shows, or small linear layers, whose three operators are recorded as well.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from evidence import RESULTS, ROOT, row, write_evidence

SOURCES = (
    "benchmarks/recording_cost.py",
    "kprof/collect/recorder/**/*.py",
    "kprof/collect/launch.py",
    "kprof/run.py",
)
RECORDER = ROOT / "kprof" / "collect" / "recorder"
NUM_MODULES = 257
SKIP, STEPS, REST = 15, 30, 30

STEP = """
import json, sys, time, torch
from torch.profiler import ProfilerActivity, profile
torch.set_num_threads(1)
what, mode = sys.argv[1:]
class Nothing(torch.nn.Module):
    def forward(self, x):
        return x
def layer():
    return Nothing() if what == "empty" else torch.nn.Linear(8, 8)
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleList(layer() for _ in range(3))
    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x
class Net(Block):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleList(Block() for _ in range(64))
net, x = Net().eval(), torch.ones(2, 8)
def run(num_steps):
    times = []
    with torch.no_grad():
        for _ in range(num_steps):
            start = time.perf_counter_ns()
            net(x)
            times.append(time.perf_counter_ns() - start)
    return times
SKIP, STEPS, REST = {sizes}
times = run(SKIP)
if mode.startswith("profiler"):
    with profile(activities=[ProfilerActivity.CPU], record_shapes=mode == "profiler with shapes"):
        times += run(STEPS)
else:
    times += run(STEPS)
print(json.dumps(times + run(REST)))
""".replace("{sizes}", str((SKIP, STEPS, REST)))

MODES = ("bare", "profiler", "profiler with shapes", "kprof", "kprof with shapes")


def environment_for(mode, folder):
    """Return the environment in which a process is recorded, or not."""
    if not mode.startswith("kprof"):
        return dict(os.environ)
    return {
        **os.environ,
        "PYTHONPATH": str(RECORDER),
        "KINETO_LOG_LEVEL": "99",
        "KPROF_RAW": str(folder / "raw"),
        "KPROF_SKIP": str(SKIP),
        "KPROF_STEPS": str(STEPS),
        "KPROF_SHAPES": str(int(mode == "kprof with shapes")),
    }


def call_us(what, mode, folder):
    """Return the median time of a module's call in one process: while recorded, and after."""
    done = subprocess.run(
        (sys.executable, "-c", STEP, what, mode),
        env=environment_for(mode, folder),
        capture_output=True,
        check=True,
    )
    times = [int(word) for word in done.stdout.strip(b"[]\n").split(b",")]
    inside, after = times[SKIP + 2 : SKIP + STEPS - 1], times[SKIP + STEPS + 2 :]
    return tuple(statistics.median(part) / NUM_MODULES / 1e3 for part in (inside, after))


def measure_calls(what, repeats, folder):
    """Return the shortest of each mode's times, in us: modes in turn, so that drift is shared."""
    found = {mode: [] for mode in MODES}
    for _ in range(repeats):
        for mode in MODES:
            found[mode].append(call_us(what, mode, folder))
    return {mode: tuple(map(min, zip(*times, strict=True))) for mode, times in found.items()}


def wall_ms(command, repeats, **options):
    """Return the shortest wall time of a command, in ms."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        subprocess.run(command, check=True, capture_output=True, **options)
        times.append(time.perf_counter_ns() - start)
    return min(times) / 1e6


def rows_of_calls(what, times):
    """Return what each layer of recording adds to a module's call."""

    def added(name, mode, to, which=0):
        value = times[mode][which] - times[to][which]
        return row(f"{what}-{name}", value, "us a module call", "lower")

    return [
        row(f"{what}-bare", times["bare"][0], "us a module call", "lower"),
        added("profiler", "profiler", "bare"),
        added("shapes", "profiler with shapes", "profiler"),
        added("kprof", "kprof with shapes", "profiler with shapes"),
        added("rest", "kprof with shapes", "bare", which=1),
    ]


def rows_of_starts(repeats, folder):
    """Return what the recorder adds to a process's start, and `kprof run` to a run."""
    recorded = environment_for("kprof", folder)
    run = (sys.executable, "-m", "kprof", "run", "--force", "--out", str(folder / "x.kprof"))
    rows = []
    for name, code in (("empty", "pass\n"), ("torch", "import torch\n")):
        script = folder / f"start_{name}.py"
        script.write_text(code)
        bare_ms = wall_ms((sys.executable, str(script)), repeats)
        recorded_ms = wall_ms((sys.executable, str(script)), repeats, env=recorded)
        whole_ms = wall_ms((*run, str(script)), repeats, cwd=ROOT)
        rows += [
            row(f"start-{name}", recorded_ms - bare_ms, "ms", "lower", bare_ms=bare_ms),
            row(f"run-{name}", whole_ms - bare_ms, "ms", "lower", bare_ms=bare_ms),
        ]
    return rows


def main():
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=2, help="fresh processes for each figure")
    parser.add_argument("--result", type=Path, default=RESULTS / "recording_cost_cpu_2026-11.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [
            *rows_of_calls("empty", measure_calls("empty", args.repeats, folder)),
            *rows_of_calls("linear", measure_calls("linear", args.repeats, folder)),
            *rows_of_starts(args.repeats, folder),
        ]
    for one in rows:
        print(f"{one['name']:16} {one['value']:8.2f} {one['unit']}")
    write_evidence(args.result, "what recording costs on the host", rows, SOURCES)


if __name__ == "__main__":
    main()
