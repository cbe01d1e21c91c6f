"""Score what kprof says of ranks that come late to the collectives.

    python benchmarks/stragglers.py                simulated ranks, 8 to 128 of them
    python benchmarks/stragglers.py --gpu          two GPUs that train with DDP, one of them late
    python benchmarks/stragglers.py --gpu --tiny   the same on CPUs, to try the way; no result

A simulated case is one of `tests/late_ranks.py`. Precision: of the ranks that kprof calls
stragglers, the share that were made late. Recall: of those made late, the share it finds.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from evidence import RESULTS, ROOT, row, write_evidence

sys.path.insert(0, str(ROOT))
from kprof.analyze.findings.rules import stragglers
from kprof.analyze.late_ranks import find_lateness
from kprof.storage import load
from tests.late_ranks import KINDS, cases, recorded

SOURCES = (
    "benchmarks/stragglers.py",
    "tests/late_ranks.py",
    "kprof/analyze/late_ranks.py",
    "kprof/analyze/findings/rules/stragglers.py",
    "kprof/collect/merge.py",
)
WORKLOAD = ROOT / "benchmarks" / "workloads" / "late_ranks.py"
REACH = 0.95
# Seeds of the cases that the rule was made on are lower.
SEED = 1_000
PLANTED = (
    *(("none", "sleep"), ("0", "sleep"), ("1", "sleep"), ("0", "work"), ("1", "work")),
    *(("turn", "work"), ("none", "work"), ("1", "sleep")),
)
# All of it ends within four minutes.
BUDGET_S = 200


def told(trace):
    """Return the ranks that kprof calls stragglers, and whether it says that lateness rotates."""
    found = find_lateness(trace)
    if found is None:
        return None, False
    is_found = found.stragglers and found.lost_ns >= stragglers.LEAST_SHARE * found.unit_ns
    least = stragglers.LEAST_ROTATING_SHARE * found.unit_ns
    return set(found.stragglers if is_found else ()), not is_found and found.rotating_ns >= least


def score(counts):
    """Return precision and recall; None where there was nothing to find or nothing was told."""
    right, wrong, missed = counts["right"], counts["wrong"], counts["missed"]
    precision = right / (right + wrong) if right + wrong else None
    return precision, right / (right + missed) if right + missed else None


def simulated(number):
    """Return the rows of simulated cases, `number` of each kind."""
    by_kind = {kind: Counter() for kind in KINDS}
    total, rotating = Counter(), Counter()
    for case in cases(number, seed=SEED):
        found, is_rotating = told(recorded(case))
        late = found or set()
        counts = Counter(
            right=len(late & case.stragglers),
            wrong=len(late - case.stragglers),
            missed=len(case.stragglers - late),
            cases=1,
            exact=int(late == case.stragglers),
        )
        by_kind[case.name.rpartition("-")[0]] += counts
        total += counts
        if case.is_rotating is not None:
            rotating[case.is_rotating, is_rotating] += 1
    precision, recall = score(total)
    rows = [
        row("precision", precision, "of the ranks named", "higher", REACH),
        row("recall", recall, "of the late ranks", "higher", REACH),
        row(
            "rotating, precision",
            rotating[True, True] / max(rotating[True, True] + rotating[False, True], 1),
            *("of cases told", "higher", REACH),
        ),
        row(
            "rotating, recall",
            rotating[True, True] / max(rotating[True, True] + rotating[True, False], 1),
            *("of cases", "higher", REACH),
        ),
    ]
    for kind, counts in by_kind.items():
        share = counts["exact"] / counts["cases"]
        rows.append(row(kind, share, "of cases exactly right", "higher", REACH, **counts))
    return rows


def planted(late, by, folder, tiny):
    """Record DDP on two ranks, one of them late, and return what kprof says of it."""
    out = Path(folder) / f"{late}-{by}.kprof"
    command = [
        *(sys.executable, "-m", "kprof", "run", "--out", str(out), "--skip", "8", "--steps", "8"),
        *("--force", "--", sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", "2", str(WORKLOAD), "--late", late, "--by", by),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{late} by {by}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    trace = load(out)
    found, is_rotating = told(trace)
    if found is None and not tiny:
        raise SystemExit(f"{late} by {by}: no collective was matched\n{done.stdout[-3000:]}")
    return trace, found or set(), is_rotating


def on_gpus(tiny):
    """Return the rows of runs on two GPUs, as many as the time allows."""
    begin, total, rows = time.monotonic(), Counter(), []
    with tempfile.TemporaryDirectory() as folder:
        for place, (late, by) in enumerate(PLANTED):
            used = time.monotonic() - begin
            if place and used * (place + 1) / place > BUDGET_S:
                print(f"out of time after {used:.0f} s: {len(PLANTED) - place} runs left out")
                break
            trace, found, is_rotating = planted(late, by, folder, tiny)
            truth = {int(late)} if late.isdigit() else set()
            right, wrong = len(found & truth), len(found - truth)
            total += Counter(right=right, wrong=wrong, missed=len(truth - found))
            claims = [f.claim for f in trace.diagnosis.findings if f.rule == "stragglers"]
            print(f"{late} by {by}: {sorted(found)}, rotating {is_rotating}; {claims}", flush=True)
            is_right = found == truth and is_rotating <= (late == "turn")
            more = {"claims": claims, "num_ranks": trace.meta.num_ranks, "is_rotating": is_rotating}
            rows.append(
                row(f"{place}: {late} late by {by}", int(is_right), "right", "higher", 1, **more)
            )
    precision, recall = score(total)
    return [
        row("precision", precision, "of the ranks named", "higher", REACH),
        row("recall", recall, "of the late ranks", "higher", REACH),
        *rows,
    ]


def main():
    """Run, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="record two GPUs instead of simulating")
    parser.add_argument("--tiny", action="store_true", help="few cases, or no GPU; no result")
    parser.add_argument("--result", type=Path, help="[default: one in benchmarks/results]")
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    args = parser.parse_args()
    rows = on_gpus(args.tiny) if args.gpu else simulated(1 if args.tiny else 20)
    for one in rows:
        print(f"{one['name']:28} {one['value']} {one['unit']}")
    if args.tiny:
        return
    name = "stragglers_h200x2_2026-11.json" if args.gpu else "stragglers_simulated_cpu_2026-11.json"
    what = "ranks that come late to collectives, on GPUs" if args.gpu else "simulated late ranks"
    workload = ("benchmarks/workloads/late_ranks.py",) if args.gpu else ()
    path = args.result or RESULTS / name
    write_evidence(path, what, rows, (*SOURCES, *workload), commit=args.commit)


if __name__ == "__main__":
    main()
