"""Judge seeded faults, timing cheats and honest rewritings by the quality gate, and count.

    python benchmarks/gate_mutations.py                  everything, on the CPU (about 40 minutes)
    python benchmarks/gate_mutations.py --seeds 1        each honest implementation once

The implementations are those of `tests/gate_faults/`. A fault or a cheat must be rejected; an
honest implementation, judged on other inputs for every seed, must not be.
"""

import argparse
import math
import os
import sys
import time
import warnings
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch
from evidence import RESULTS, ROOT, row, write_evidence

sys.path.insert(0, str(ROOT))
from tests.gate_faults import CHEATS, FAULTS, HONEST, ON_A_GPU, SAME, judge, standard_kept

SOURCES = (
    "benchmarks/gate_mutations.py",
    "kprof/kernels/correctness/*.py",
    "tests/gate_faults/*.py",
)
SEEDS = 10
CAUGHT = 0.95
HONEST_KINDS = ("A/A", "honest")
# Faults of one operation that one process judges before another takes the next.
MOST_TOGETHER = 12
VARIANTS = {
    (kind, variant.operation, variant.name): variant
    for kind, variants in (
        ("fault", FAULTS + ON_A_GPU),
        ("cheat", CHEATS),
        ("A/A", SAME),
        ("honest", HONEST),
    )
    for variant in variants
}
FALSE_REJECTIONS = 0.01


def judged(variant, kind, seed=0):
    """Return what the gate says of one implementation."""
    start = time.perf_counter()
    subject = replace(variant.subject, seed=seed)
    if kind in HONEST_KINDS:
        report = judge(subject)
    else:
        # What the first level catches need not be shown to the second.
        report = judge(subject, ("L0",))
        report = judge(variant.subject, ("L1",)) if report.passed else report
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


@dataclass(frozen=True)
class Part:
    """Implementations of one operation that are judged beside each other, on the same inputs."""

    operation: str
    variants: tuple[tuple[str, str], ...]
    """Kind and name of each."""
    seed: int = 0


def parts_of(chosen, seeds):
    """Return what there is to do: of each operation the faults, then the honest ones by seeds."""
    parts = []
    for operation in dict.fromkeys(variant.operation for _, variant in chosen):
        own = [(kind, v.name) for kind, v in chosen if v.operation == operation]
        honest = tuple(one for one in own if one[0] in HONEST_KINDS)
        broken = tuple(one for one in own if one[0] not in HONEST_KINDS)
        few = [broken[i : i + MOST_TOGETHER] for i in range(0, len(broken), MOST_TOGETHER)]
        parts += [Part(operation, one) for one in few]
        parts += [Part(operation, honest, seed) for seed in range(seeds) if honest]
    # What is broken first, then one seed after the other: an early end leaves whole seeds.
    return sorted(parts, key=lambda part: (part.variants[0][0] in HONEST_KINDS, part.seed))


def judge_part(part):
    """Return what the gate says of each implementation of a part."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with standard_kept():
        return [
            judged(VARIANTS[kind, part.operation, name], kind, part.seed)
            for kind, name in part.variants
        ]


def rows_of(chosen, found):
    """Return a row for each implementation: caught or not, or how often it was rejected."""
    return [
        honest_row(variant, kind, runs) if kind in HONEST_KINDS else broken_row(variant, kind, runs)
        for kind, variant in chosen
        if (runs := found.get((kind, variant.operation, variant.name), [])) or not can_run(variant)
    ]


def broken_row(variant, kind, runs):
    """Return the row of one fault or cheat: 1 where it was caught, None where it cannot run."""
    name = f"{variant.operation}: {variant.name}"
    if not runs:
        more = {"kind": kind, "operation": variant.operation, "implementation": variant.name}
        return row(name, None, "caught", "higher", 1, missing="a CUDA device", **more)
    (run,) = runs
    caught = int(not run["passed"])
    more = {key: one for key, one in run.items() if key != "passed"}
    return row(name, caught, "caught", "higher", 1, **more)


def honest_row(variant, kind, runs):
    """Return the row of one honest implementation: how often it was rejected."""
    rejected = [run["by"] for run in runs if not run["passed"]]
    more = {"kind": kind, "operation": variant.operation, "implementation": variant.name}
    name = f"{variant.operation}: {variant.name}"
    return row(name, len(rejected), "rejections", "lower", 0, runs=len(runs), by=rejected, **more)


def can_run(variant):
    """Tell whether there is the device that it takes."""
    return variant.device != "cuda" or torch.cuda.is_available()


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
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    args = parser.parse_args()
    chosen = [
        (kind, variant)
        for (kind, *_), variant in VARIANTS.items()
        if not args.names or {variant.operation, variant.name} & set(args.names)
    ]
    parts = parts_of([one for one in chosen if can_run(one[1])], args.seeds)
    found = defaultdict(list)
    pool = ProcessPoolExecutor(args.jobs, get_context("spawn"))
    try:
        for runs in pool.map(judge_part, parts):
            for run in runs:
                found[run["kind"], run["operation"], run["implementation"]].append(run)
    except KeyboardInterrupt:
        print("interrupted: the result holds what was judged so far", flush=True)
    pool.shutdown(cancel_futures=True)
    rows = rows_of(chosen, found)
    if args.names:
        return
    rows = totals(rows) + rows
    for one in rows[:4]:
        print(f"{one['name']}: {one['value']} of {one['of']}, {'met' if one['met'] else 'NOT MET'}")
    write_evidence(args.result, "what the quality gate catches", rows, SOURCES, commit=args.commit)


if __name__ == "__main__":
    main()
