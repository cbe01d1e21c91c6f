"""What kprof costs a training step, recorded and not: the same script with and without it, in turn.

    python benchmarks/overhead.py

Every process trains the Llama of `workloads/llama_train.py` and writes the time of each step; runs
without kprof and under it alternate, so that drift falls on both.
"""

import argparse
import datetime
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from evidence import RESULTS, ROOT, row, write_evidence

SCRIPT = "benchmarks/workloads/llama_train.py"
SOURCES = (
    "benchmarks/overhead.py",
    SCRIPT,
    "kprof/collect/launch.py",
    "kprof/collect/nvml.py",
    "kprof/collect/recorder/**/*.py",
)
# The installed program, as users have it, not this working tree.
KPROF = shutil.which("kprof") or str(Path(sys.executable).parent / "kprof")
SKIP, STEPS = 10, 6
# Steps before the light pass, which has as many as the window, and before all is over.
LIGHT = SKIP + STEPS + 2
OVER = LIGHT + STEPS
REACH_UNRECORDED, REACH_RECORDED, REACH_LIGHT = 0.01, 0.10, 0.02


def step_times(prefix, workload, folder):
    """Run the workload once and return the time of each of its steps, in ms."""
    times = folder / "times.json"
    command = [*prefix, SCRIPT, *workload, "--times", str(times)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return json.loads(times.read_text())


def parts_of(steps):
    """Return recorded steps, those of the light pass, and unrecorded ones clear of both.

    Of each pass without the first and the last, which holds its end.
    """
    return steps[SKIP + 1 : SKIP + STEPS - 1], steps[LIGHT + 1 : OVER - 1], steps[OVER + 3 :]


def measure(workload, pairs, folder):
    """Return step times: without kprof, unrecorded under it, of both passes; and runs' stalls."""
    plain, unrecorded, recorded, light, stalls = [], [], [], [], []
    window = ["--skip", str(SKIP), "--steps", str(STEPS)]
    recorder = [KPROF, "run", *window, "--force", "--out", str(folder / "x.kprof")]
    for _ in range(pairs):
        plain += parts_of(step_times([sys.executable], workload, folder))[-1]
        steps = step_times(recorder, workload, folder)
        mine, lightly, after = parts_of(steps)
        recorded += mine
        light += lightly
        unrecorded += after
        edges = (SKIP - 1, SKIP, *range(SKIP + STEPS - 1, LIGHT + 1), *range(OVER - 1, OVER + 3))
        usual = statistics.median(after)
        stalls.append(sum(steps[edge] - usual for edge in edges))
    return plain, unrecorded, recorded, light, stalls


def spread(times):
    """Return the interquartile range over the median."""
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / middle


def rows_of(plain, unrecorded, recorded, light, stalls):
    """Return the rows of the result."""
    base = statistics.median(plain)

    def slower(name, times, reach):
        value = statistics.median(times) / base - 1
        more = {"num_steps": len(times), "step_ms_without_kprof": base}
        return row(name, value, "share slower than without kprof", "lower", reach, **more)

    return [
        slower("unrecorded step", unrecorded, REACH_UNRECORDED),
        slower("recorded step", recorded, REACH_RECORDED),
        row("stalls at the edges of the recording", statistics.median(stalls), "ms", "lower"),
        row("spread of steps without kprof", spread(plain), "IQR over median", "lower"),
        slower("step of the light pass", light, REACH_LIGHT),
    ]


def main():
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=4, help="runs with and without kprof")
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    parser.add_argument("--result", type=Path)
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    args = parser.parse_args()
    workload = ["--steps", "40", *(["--tiny"] if args.tiny else ["--batch", "6"])]
    with tempfile.TemporaryDirectory() as folder:
        rows = rows_of(*measure(workload, args.pairs, Path(folder)))
    for entry in rows:
        print(f"{entry['name']}: {entry['value']} {entry['unit']}, met: {entry['met']}")
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    path = args.result or RESULTS / f"overhead_h200_{month}.json"
    write_evidence(path, "what kprof costs a training step", rows, SOURCES, commit=args.commit)


if __name__ == "__main__":
    main()
