"""Judge seeded faults, timing cheats and honest rewritings by the quality gate, and count.

    python benchmarks/gate_mutations.py                  everything, on the CPU (about 20 minutes)
    python benchmarks/gate_mutations.py --seeds 1        each honest implementation once

The implementations are those of `tests/gate_faults/`. A fault or a cheat must be rejected; an
honest implementation, judged on other inputs for every seed, must not be.
"""

import argparse
import math
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from evidence import RESULTS, ROOT, row, write_evidence

sys.path.insert(0, str(ROOT))
from tests.gate_faults import CHEATS, FAULTS, HONEST, ON_A_GPU, SAME, judge

SOURCES = ("benchmarks/gate_mutations.py", "kprof/gate/*.py", "tests/gate_faults/*.py")
SEEDS = 10
CAUGHT = 0.95
FALSE_REJECTIONS = 0.01


def judged(variant, kind, seed=0):
    """Return what the gate says of one implementation."""
    start = time.perf_counter()
    report = judge(replace(variant.subject, seed=seed))
    broken = [(level, m) for level in report.levels for m in level.measures if not m.is_met]
    found = {
        "kind": kind,
        "operation": variant.operation,
        "implementation": variant.name,
        "passed": report.passed,
        "reached": report.reached,
        "failed_at": [level.name for level in report.levels if level.state == "failed"],
        "by": [f"{level.name}: {m}" for level, m in broken][:3],
    }
    state = "passed" if report.passed else f"rejected by {found['by'][0]}"
    name = f"{variant.operation}: {variant.name}"
    print(f"{kind:7} {name:52} {state} ({time.perf_counter() - start:.1f} s)", flush=True)
    return found


def broken_row(variant, kind):
    """Return the row of one fault or cheat: 1 where it was caught, None where it cannot run."""
    if variant.device == "cuda" and not torch.cuda.is_available():
        more = {"kind": kind, "operation": variant.operation, "implementation": variant.name}
        name = f"{variant.operation}: {variant.name}"
        return row(name, None, "caught", "higher", 1, missing="a CUDA device", **more)
    found = judged(variant, kind)
    caught = int(not found.pop("passed"))
    return row(f"{variant.operation}: {variant.name}", caught, "caught", "higher", 1, **found)


def honest_row(variant, seeds):
    """Return the row of one honest implementation: how often it was rejected."""
    kind = "A/A" if variant.name == "the same" else "honest"
    runs = [judged(variant, kind, seed) for seed in range(seeds)]
    rejected = [run["by"] for run in runs if not run["passed"]]
    more = {key: runs[0][key] for key in ("kind", "operation", "implementation")}
    name = f"{variant.operation}: {variant.name}"
    return row(name, len(rejected), "rejections", "lower", 0, runs=seeds, by=rejected, **more)


def upper_bound(events, trials):
    """Return the 95 % upper bound of a rate (Clopper and Pearson), by bisection."""
    low, high = events / trials, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        at_most = sum(
            math.comb(trials, k) * middle**k * (1 - middle) ** (trials - k)
            for k in range(events + 1)
        )
        low, high = (middle, high) if at_most > 0.05 else (low, middle)
    return high


def totals(rows):
    """Return the rows that the targets are about."""
    faults = [one["value"] for one in rows if one["kind"] == "fault" and one["value"] is not None]
    cheats = [one["value"] for one in rows if one["kind"] == "cheat"]
    honest = [one for one in rows if one["kind"] in ("A/A", "honest")]
    runs, rejected = (sum(int(one[key]) for one in honest) for key in ("runs", "value"))
    both = faults + cheats
    of_faults, of_cheats = {"caught": int(sum(faults))}, {"caught": int(sum(cheats))}
    return [
        row("caught", sum(both) / len(both), "share", "higher", CAUGHT, of=len(both)),
        row(
            "faults_caught",
            sum(faults) / len(faults),
            "share",
            "higher",
            1,
            of=len(faults),
            **of_faults,
        ),
        row(
            "cheats_caught",
            sum(cheats) / len(cheats),
            "share",
            "higher",
            1,
            of=len(cheats),
            **of_cheats,
        ),
        row(
            "false_rejections",
            rejected / runs,
            "share",
            "lower",
            FALSE_REJECTIONS,
            of=runs,
            rejected=rejected,
            upper_bound_95=float(f"{upper_bound(rejected, runs):.3g}"),
        ),
    ]


def main():
    """Judge everything, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="only operations or implementations named so")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="runs of each honest one")
    parser.add_argument("--result", type=Path, default=RESULTS / "gate_mutations_cpu_2026-11.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")

    def chosen(variants):
        return [v for v in variants if not args.names or {v.operation, v.name} & set(args.names)]

    rows = [broken_row(variant, "fault") for variant in chosen(FAULTS + ON_A_GPU)]
    rows += [broken_row(variant, "cheat") for variant in chosen(CHEATS)]
    rows += [honest_row(variant, args.seeds) for variant in chosen(SAME + HONEST)]
    if args.names:
        return
    rows = totals(rows) + rows
    for one in rows[:4]:
        print(f"{one['name']}: {one['value']} of {one['of']}, {'met' if one['met'] else 'NOT MET'}")
    write_evidence(args.result, "what the quality gate catches", rows, SOURCES)


if __name__ == "__main__":
    main()
