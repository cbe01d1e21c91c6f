"""Run two GPUs with and without kprof: cost, late ranks, and what a step is without them.

    python benchmarks/ranks_gpu.py           a Llama-shaped model: FSDP2, tensor parallelism
    python benchmarks/ranks_gpu.py --tiny    the same on CPUs, to try the way; no result

Each run is a process group of its own under torchrun, with `kprof run` before it or without. The
time of a step is that of rank 0's own clock, between two losses. What a step would be without the
late rank is predicted from the run with it, and compared with the run without it, both recorded.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from evidence import RESULTS, ROOT, row, write_evidence

sys.path.insert(0, str(ROOT))
from kprof.analyze.bus_bandwidth import measure_collectives
from kprof.analyze.condense import rank_totals
from kprof.analyze.late_causes import find_late_causes
from kprof.analyze.late_ranks import find_lateness
from kprof.storage import load

SOURCES = (
    "benchmarks/ranks_gpu.py",
    "benchmarks/workloads/ranks_llama.py",
    "kprof/analyze/bus_bandwidth.py",
    "kprof/analyze/late_causes.py",
    "kprof/analyze/late_ranks.py",
)
WORKLOAD = ROOT / "benchmarks" / "workloads" / "ranks_llama.py"
SKIP, STEPS = 8, 10
# The window begins and ends with the recorder's own work, so a step at either end does not count.
RECORDED, AFTER = slice(SKIP + 1, SKIP + STEPS - 1), slice(SKIP + STEPS + 4, -1)
# All of it ends within this time.
BUDGET_S = 165
WITHIN, COST = 0.03, 0.03


@dataclass(frozen=True)
class Ran:
    """One run: what rank 0 measured, and its recording where kprof recorded it."""

    said: dict
    trace: object = None

    def step_ms(self, steps):
        """Return the median time of some steps by the workload's own clock."""
        return statistics.median(self.said["step_ns"][steps]) / 1e6


class Runs:
    """Runs the workload, as often as the time allows."""

    def __init__(self, folder, budget_s):
        self.folder, self.budget_s = Path(folder), budget_s
        self.begin, self.num_done = time.monotonic(), 0

    def has_time_for(self, number):
        """Tell whether so many more runs fit, by the time of those before."""
        used_s = time.monotonic() - self.begin
        fits = used_s * (1 + number / max(self.num_done, 1)) < self.budget_s
        if not fits:
            print(f"out of time after {used_s:.0f} s", flush=True)
        return fits

    def run(self, *args, recorded=False):
        """Run the workload on two ranks, with kprof or without."""
        said, out = self.folder / "said.json", self.folder / "run.kprof"
        torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, "--nproc-per-node", "2", str(WORKLOAD), *args, "--said", str(said)]
        if recorded:
            kprof = [sys.executable, "-m", "kprof", "run", "--out", str(out), "--force"]
            command = [*kprof, "--skip", str(SKIP), "--steps", str(STEPS), "--", *command]
        begin = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            raise SystemExit(f"{args}: exit code {done.returncode}\n{done.stderr[-3000:]}")
        how = "kprof" if recorded else "plain"
        print(f"{' '.join(args)}, {how}: {time.monotonic() - begin:.1f} s", flush=True)
        self.num_done += 1
        return Ran(json.loads(said.read_text()), load(out) if recorded else None)


def cost_rows(name, plain, recorded):
    """Return what recording costs, by alternating runs, and whether results are alike."""
    rows = []
    for part, steps in (("in the window", RECORDED), ("after it", AFTER)):
        without, with_kprof = (
            statistics.mean(one.step_ms(steps) for one in runs) for runs in (plain, recorded)
        )
        cost = with_kprof / without - 1
        more = {"plain_ms": [one.step_ms(steps) for one in plain]}
        more["kprof_ms"] = [one.step_ms(steps) for one in recorded]
        rows.append(row(f"{name}: cost {part}", cost, "of a step", "lower", COST, **more))
    results = [one.said["results"] for one in (*plain, *recorded)]
    is_alike = all(one == results[0] for one in results)
    rows.append(row(f"{name}: results alike", int(is_alike), "bit for bit", "higher", 1))
    return rows


def late_rows(name, late, in_time, rank):
    """Return whether the late rank and its cause were found, and the step without it."""
    found, causes = find_lateness(late.trace), find_late_causes(late.trace)
    claims = [f.claim for f in late.trace.diagnosis.findings if f.rule == "stragglers"]
    told = [(one.rank, one.cause, one.why_not) for one in causes]
    stragglers = found.stragglers if found else ()
    more = {"claims": claims, "causes": told, "clocks": late.trace.meta.clocks}
    is_right = stragglers == (rank,)
    rows = [row(f"{name}: late rank found", int(is_right), "right", "higher", 1, **more)]
    if found is not None and is_right:
        now, other = late.step_ms(RECORDED), in_time.step_ms(RECORDED)
        predicted = now - found.lost_ns / 1e6
        apart = abs(predicted / other - 1)
        more = {"late_ms": now, "predicted_ms": predicted, "measured_ms": other}
        more |= {"late_unit_ms": found.unit_ns / 1e6, "lost_ms": found.lost_ns / 1e6}
        usual = find_lateness(in_time.trace)
        more["measured_unit_ms"] = usual.unit_ns / 1e6 if usual else None
        rows.append(
            row(f"{name}: step without it", apart, "from measured", "lower", WITHIN, **more)
        )
    return rows


def bandwidth_rows(trace, curve, name):
    """Return the bus bandwidth of each operation in a recording against the curve by size."""
    rows = []
    for one in measure_collectives(trace).to_dict("records"):
        operation = str(one["collective"])
        letters = operation.replace("_", "")
        known = next((key for key in curve if letters.startswith(key.replace("_", ""))), None)
        if known is None or not np.isfinite(one["bus_bytes_per_s"]):
            continue
        size = one["algorithm_bytes_per_s"] * one["transfer_ns"] * 1e-9
        sizes, rates = np.array(curve[known]).T
        ceiling = float(np.interp(np.log(size), np.log(sizes), rates))
        more = {"bytes": size, "bus_gb_per_s": one["bus_bytes_per_s"] / 1e9}
        more |= {"curve_gb_per_s": ceiling / 1e9, "calls": one["calls"], "group": one["group"]}
        share = one["bus_bytes_per_s"] / ceiling
        rows.append(row(f"{name}: {operation}", share, "of the curve", "higher", **more))
    return rows


def train_rows(runs):
    """Return the rows of training and of the curve; the most telling runs come first."""
    in_time = runs.run("--kind", "train", recorded=True)
    for one in rank_totals(in_time.trace):
        print(f"rank {one.rank}: {one.place}, {len(one.gpu_uuids)} GPU, {one.host}", flush=True)
    recorded, plain = [in_time], [runs.run("--kind", "train")]
    rows = []
    for by, rank in (("loader", 1), ("sleep", 0)):
        if runs.has_time_for(1):
            late = runs.run("--kind", "train", "--late", str(rank), "--by", by, recorded=True)
            rows += late_rows(f"train, rank {rank} late by {by}", late, in_time, rank)
    curve = runs.run("--kind", "curve").said["curve"]
    for operation, points in curve.items():
        for size, rate in points:
            rows.append(row(f"curve: {operation}, {size} bytes", rate / 1e9, "GB/s", "higher"))
    rows += bandwidth_rows(in_time.trace, curve, "train")
    if runs.has_time_for(2):
        recorded.append(runs.run("--kind", "train", recorded=True))
        plain.append(runs.run("--kind", "train"))
    return [*rows, *cost_rows("train", plain, recorded)], curve


def tensor_rows(runs, curve):
    """Return the rows of inference with tensor parallelism."""
    if not runs.has_time_for(2):
        return []
    recorded = runs.run("--kind", "tensor", recorded=True)
    plain = runs.run("--kind", "tensor")
    name = "tensor parallel"
    return [
        *bandwidth_rows(recorded.trace, curve, name),
        *cost_rows(name, [plain], [recorded]),
    ]


def main():
    """Run, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="on CPUs; no result")
    parser.add_argument("--result", type=Path, help="[default: one in benchmarks/results]")
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(folder, float("inf") if args.tiny else BUDGET_S)
        rows, curve = train_rows(runs)
        rows += tensor_rows(runs, curve)
    for one in rows:
        more = {key: value for key, value in one.items() if key.endswith(("_ms", "_s", "s"))}
        print(f"{one['name']:40} {one['value']} {one['unit']} {more}")
    if not args.tiny:
        path = args.result or RESULTS / "ranks_h200x2_2026-11.json"
        write_evidence(path, "two GPUs with and without kprof", rows, SOURCES, commit=args.commit)


if __name__ == "__main__":
    main()
