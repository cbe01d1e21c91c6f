"""Score what-if predictions on real changes: each workload before and after, measured both times.

    python benchmarks/whatif.py --out whatif-runs

records both sides of every change with `kprof run`, asks the first what the change would bring,
and writes `benchmarks/results/whatif_<gpu>_<yyyy-mm>.json` with two scores for each:

* given: told only what the changed kernels take afterwards and how many there are;
* predicted: told only what kind of change it is (a roofline, removed, graphs), nothing measured.

Beside each stands the plain Amdahl figure; and of the former, whether the truth lay within what
was said that it may be off by. `--tiny` runs the way on the CPU, where a prediction is
Amdahl's; `--again RESULT` analyzes and scores the runs in `--out` again, which that result is of;
`--only NAME` takes one change.
The result is written anew after every change, and after `--minutes` no further one is begun.
"""

from __future__ import annotations

import argparse
import datetime
import re
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from evidence import RESULTS, describe_gpu, measured_by, row, write_evidence

import kprof
from kprof.analyze.capture_quality.overhead import measure_cost
from kprof.analyze.whatif.baseline import find_baseline
from kprof.analyze.whatif.changes import (
    FASTER,
    GRAPHED,
    REMOVED,
    REPLACED,
    ROOFLINE,
    WITHOUT,
    Change,
    Target,
    rows_of,
)
from kprof.analyze.whatif.predict import predict
from kprof.errors import KprofError

WORKLOAD = Path(__file__).resolve().parent / "workloads" / "changes" / "loop.py"
OPTIONS = ("--skip", "10", "--steps", "4", "--force")
REACH = 0.05
MOST_SECONDS = 240
MEASURED = (
    "kprof/analyze/**/*.py",
    "kprof/collect/**/*.py",
    "benchmarks/whatif.py",
    "benchmarks/workloads/changes/loop.py",
)


@dataclass(frozen=True)
class Case:
    """A change: what it concerns before it, and what one would have asked for beforehand."""

    name: str
    targets: tuple[str, ...]
    """What the change exchanges or speeds up; `sort:name`, in which * stands for anything."""
    question: tuple[Change, ...]
    structure: tuple[Change, ...] = ()
    """What changes besides the kernels' times, which counts as given: waits, graphs."""


def roofline(*names):
    """Ask for each target at its roofline."""
    return tuple(Change(ROOFLINE, target(name)) for name in names)


def removed(*names):
    """Ask for each target to be gone."""
    return tuple(Change(REMOVED, target(name)) for name in names)


def target(text):
    """Read `sort:name`."""
    sort, _, name = text.partition(":")
    return Target(sort, name)


ATTENTION = ("module:*.attend",)
NO_SYNC = (Change(WITHOUT, cause="synchronization"),)
NO_PAGEABLE = (Change(WITHOUT, cause="pageable copy"),)
GRAPHS = (Change(GRAPHED),)
FETCHED = ("op:aten::linalg_vector_norm", "op:aten::item")
# One of every sort comes first, for time may be short; what compiles comes last.
CASES = (
    Case("attention", ATTENTION, roofline(*ATTENTION)),
    Case("fused_optimizer", ("phase:optimizer",), roofline("phase:optimizer")),
    Case("no_item", FETCHED, (*removed(*FETCHED), *NO_SYNC), NO_SYNC),
    Case("graphs", ("kernel:*",), GRAPHS, GRAPHS),
    Case("channels_last", ("kind:convolution", "kernel:*nchw*"), removed("kernel:*nchw*")),
    Case("fused_norm", ("module:*_norm",), roofline("module:*_norm")),
    Case("pinned_copy", ("kernel:Memcpy HtoD*",), NO_PAGEABLE, NO_PAGEABLE),
    Case("fused_activation", ("module:*.activation",), roofline("module:*.activation")),
    Case("no_dropout", ("op:aten::native_dropout*",), removed("op:aten::native_dropout*")),
    Case("joined_projections", ("module:*.qkv",), roofline("module:*.qkv")),
    Case("bf16", ("kernel:*",), (Change(FASTER, Target("kernel", "*"), 2.0),)),
    Case("tf32", ("kind:gemm",), (Change(FASTER, Target("kind", "gemm"), 8.0),)),
    Case("foreach_optimizer", ("phase:optimizer",), roofline("phase:optimizer")),
    Case("zero_grad", ("op:aten::_foreach_zero_",), removed("op:aten::_foreach_zero_")),
    Case("compiled", ("kernel:*",), roofline("kind:elementwise", "kind:norm")),
)


def folder_of(case, side, chosen):
    """Return the run folder of one side."""
    return chosen.out / f"{case.name}-{side}.kprof"


def record(case, side, chosen):
    """Run one side under kprof, or analyze its recording again; return its run folder."""
    folder = folder_of(case, side, chosen)
    program = shutil.which("kprof") or str(Path(sys.executable).parent / "kprof")
    script = [str(WORKLOAD), case.name, side, *(["--tiny"] if chosen.tiny else [])]
    run = ["run", *OPTIONS, "--out", str(folder), *script]
    again = ["open", "--force", str(folder)]
    subprocess.run(
        [program, *(again if chosen.again else run)],
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        timeout=MOST_SECONDS,
    )
    return folder


def step_of(trace):
    """Return what a step takes: without the recorder, where such steps were timed."""
    cost = measure_cost(trace)
    if cost is not None and not trace.is_host_only:
        return cost.unrecorded_ns
    return find_baseline(trace).step_ns


def given_changes(case, before, after):
    """Return the change with the new time and number of its kernels, as the second run has them.

    What is not changed is taken to run as before: the difference of the runs is the targets'.
    """
    steps = [find_baseline(trace).num_steps for trace in (before, after)]
    rows = sum(rows_of(target(text), before) for text in case.targets).astype(bool)
    if not rows.any():
        return None
    totals = [
        (int(trace.kernels["duration_ns"].sum()) / n, len(trace.kernels) / n)
        for trace, n in zip((before, after), steps, strict=True)
    ]
    own = int(before.kernels["duration_ns"][rows].sum()) / steps[0], int(rows.sum()) / steps[0]
    time_ns, launches = (
        max(o + new - old, 0) for o, old, new in zip(own, totals[0], totals[1], strict=True)
    )
    ratio = own[0] / max(time_ns, 1)
    if case.structure == GRAPHS or round(launches) >= round(own[1]):
        return [*(Change(FASTER, target(t), ratio) for t in case.targets), *case.structure]
    first = next(t for t in case.targets if rows_of(target(t), before).any())
    changed = Change(REPLACED, target(first), total_ns=int(time_ns), launches=round(launches))
    rest = [Change(REMOVED, target(t)) for t in case.targets if t != first]
    return [changed, *rest, *case.structure]


def score(case, folders):
    """Return the row of a case: both predictions against what the second side measured."""
    before, after = (kprof.load(folder) for folder in folders)
    baseline, truth_ns = find_baseline(before), step_of(after)
    told = predict(case.question, baseline)
    given = given_changes(case, before, after)
    known = predict(given, baseline) if given else None
    return {
        "before_ms": baseline.step_ns / 1e6,
        "after_ms": truth_ns / 1e6,
        "replay_error": baseline.error,
        "given": _outcome(known, truth_ns),
        "predicted": _outcome(told, truth_ns),
    }


def _outcome(prediction, truth_ns):
    if prediction is None or prediction.predicted_step_ns is None:
        reason = "no kernel of the target ran before" if prediction is None else prediction.reason
        return {"error": None, "amdahl_error": None, "reason": reason}
    return {
        "target": prediction.target,
        "change": prediction.change,
        "step_ms": prediction.predicted_step_ns / 1e6,
        "uncertainty_ms": prediction.uncertainty_ns / 1e6,
        "is_within": prediction.shortest_step_ns <= truth_ns <= prediction.longest_step_ns,
        "amdahl_ms": prediction.amdahl_step_ns / 1e6,
        "error": prediction.predicted_step_ns / truth_ns - 1,
        "amdahl_error": prediction.amdahl_step_ns / truth_ns - 1,
        "reason": None,
    }


def rows_from(scores):
    """Return one row a case, and the medians."""
    rows = []
    for way in ("given", "predicted"):
        known = [abs(s[way]["error"]) for s in scores.values() if s[way]["error"] is not None]
        amdahl = [
            abs(s[way]["amdahl_error"]) for s in scores.values() if s[way]["error"] is not None
        ]
        reach = REACH if way == "given" else None
        told = {"num_cases": len(known), "num_untold": len(scores) - len(known)}
        rows.append(
            row(
                f"{way}, median of {len(known)}",
                statistics.median(known) if known else None,
                "share",
                "lower",
                reach,
                peer="Amdahl",
                peer_value=statistics.median(amdahl) if amdahl else None,
                **told,
            )
        )
        for name, one in scores.items():
            error = one[way]["error"]
            rows.append(
                row(
                    f"{name}, {way}",
                    None if error is None else abs(error),
                    "share",
                    "lower",
                    before_ms=one["before_ms"],
                    after_ms=one["after_ms"],
                    replay_error=one["replay_error"],
                    **{key: value for key, value in one[way].items() if key != "error"},
                )
            )
    known = [one["given"] for one in scores.values() if one["given"]["error"] is not None]
    within = sum(one["is_within"] for one in known) / len(known) if known else None
    rows.append(row("given, within what was said", within, "share", "higher", of=len(known)))
    return rows


def main():
    """Record, score and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("whatif-runs"))
    parser.add_argument("--tiny", action="store_true", help="small, and no result is kept")
    parser.add_argument("--again", type=Path, help="an earlier result of the runs in --out")
    parser.add_argument("--only", action="append", help="take this change only")
    parser.add_argument("--minutes", type=float, default=30, help="after which none is begun")
    parser.add_argument("--result", type=Path, help="the file to write")
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    before = measured_by(chosen.again)
    gpu = {**describe_gpu(), **before}["gpu"]
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    short = re.sub(r"nvidia|\W", "", (gpu or "cpu").lower())
    folder = chosen.out if chosen.tiny or gpu is None else RESULTS
    path = chosen.result or folder / f"whatif_{short}_{month}.json"
    what = "what-if predictions against real changes"
    scores = {}
    for case, one in score_all(chosen):
        scores[case.name] = one
        print(
            f"{case.name:20s} {one['before_ms']:9.2f} -> {one['after_ms']:9.2f} ms",
            *(f"{way} {_percent(one[way]['error'])}" for way in ("given", "predicted")),
            f"  replay {_percent(one['replay_error'])}",
            flush=True,
        )
        write_evidence(path, what, rows_from(scores), MEASURED, commit=chosen.commit, **before)
    for entry in rows_from(scores)[:: len(scores) + 1]:
        print(f"{entry['name']}: {entry['value']}, Amdahl {entry['peer_value']}")
    return 0 if scores else 1


def score_all(chosen):
    """Yield each change that was asked for with its score; what fails is told and left out."""
    began = time.monotonic()
    for case in CASES:
        if chosen.only and case.name not in chosen.only:
            continue
        if time.monotonic() - began > 60 * chosen.minutes:
            print(f"{case.name}: no time was left for it", flush=True)
            continue
        if chosen.again and not folder_of(case, "after", chosen).is_dir():
            print(f"{case.name}: no run is there", flush=True)
            continue
        try:
            yield case, score(case, [record(case, side, chosen) for side in ("before", "after")])
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired, KprofError) as error:
            print(f"{case.name}: {error}", flush=True)


def _percent(error):
    return "   cannot tell" if error is None else f"{100 * error:+8.1f} %"


if __name__ == "__main__":
    sys.exit(main())
