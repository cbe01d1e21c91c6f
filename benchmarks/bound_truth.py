"""Check what kprof says bounds kernels that a seed draws against hardware counters.

    python benchmarks/bound_truth.py --seeds 11 12 13 --out drawn

draws operators of torch's own test samples, blocks of Hugging Face models, compiled chains and
hand-written Triton kernels (`benchmarks/workloads/drawn`), records them (`kprof run`), counts every
kernel (`kprof ncu`: clocks left alone, caches flushed before each launch), and writes
`benchmarks/results/bound_truth_<gpu>_<yyyy-mm>.json`. A new seed is a new set: change
rules on some seeds, and report others, looked at once.

A claim is a bound other than unknown in the recorded run, as kprof shows it. It is right where the
counters give the same class; compute and issue are one class there. Launches within 5 points of a
border count nowhere. Distinct launches are those of one kernel over one grid in one case; the first
of each counts. After `--minutes` the counted step begins no further case.
`--again RESULT` analyzes and scores the runs of an earlier result anew, anywhere; `--tiny` tries
the way on a CPU, up to the counting. Several `--out` are scored together.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from pathlib import Path

import numpy as np
import pandas as pd
from classify_vs_ncu import EVERYTHING, MOST_LAUNCHES, kprof_does, write_scores
from evidence import measured_by, row

import kprof
from kprof.analyze.roofline.agreement import as_recorded, is_borderline, traffic_ratio
from kprof.analyze.roofline.bound import BOUNDS, bound_by_counters, kept_bytes
from kprof.analyze.roofline.hardware_counters import counted_bytes, counted_shares
from kprof.analyze.roofline.launch_work import find_row_work
from kprof.device import find_device

WORKLOAD = Path(__file__).resolve().parent / "workloads" / "drawn" / "loop.py"
RUN = "drawn.kprof"
PARTS = ("operators", "models", "compiled", "triton")
LAUNCH = ["name", "grid", "block", "case"]
ENOUGH, RIGHT, COVERED_TIME, COVERED_LAUNCHES = 600, 0.95, 0.90, 0.70
BYTES_MEDIAN, BYTES_P90 = 0.05, 0.20
LISTED = 80
# Of the time, to try which cases run.
CHOOSING_SHARE = 0.3
# What is left to do after the last case: exporting and reading the report.
AFTERWARDS_S = 12
# A case that ends the process is left out by the next attempt.
ATTEMPTS = 4
MEASURED = (
    "kprof/analyze/**/*.py",
    "kprof/analyze/work/*.py",
    "kprof/collect/**/*.py",
    "kprof/opened.py",
    "benchmarks/bound_truth.py",
    "benchmarks/workloads/drawn/loop.py",
    "benchmarks/workloads/drawn/cases.py",
    "benchmarks/workloads/drawn/models.py",
    "benchmarks/workloads/drawn/chains.py",
    "benchmarks/workloads/drawn/triton_kernels.py",
)


def record(out, seeds, tiny, minutes):
    """Record and count the cases of some seeds."""
    until = time.time() + 60 * minutes - AFTERWARDS_S
    folder, chosen = out / RUN, out / "chosen.json"
    chosen.unlink(missing_ok=True)
    script = [str(WORKLOAD), *(["--tiny"] if tiny else []), "--chosen", str(chosen)]
    script += ["--choosing-s", str(CHOOSING_SHARE * 60 * minutes)]
    options = ["--skip", "1", "--steps", "1", "--force", "--out", str(folder)]
    for attempt in range(ATTEMPTS):
        try:
            kprof_does("run", *options, *script, "--seeds", *map(str, seeds))
            break
        except subprocess.CalledProcessError:
            if attempt == ATTEMPTS - 1:
                raise
    if not tiny:
        counting = ["ncu", str(folder), "--kernels", EVERYTHING, "--launches", MOST_LAUNCHES]
        kprof_does(*counting, until=until)


def counted_launches(trace):
    """Return the counted launches of the cases, with case, part and seed."""
    case = cases_of(trace)
    words = case.str.split(":", n=3, expand=True).reindex(columns=range(4))
    kernels = trace.kernels.assign(case=case, seed=words[1], part=words[2])
    kernels["kept_bytes"] = kept_of(trace)
    kernels = kernels[(bound_by_counters(kernels) >= 0) & case.notna()]
    return kernels.sort_values("start_ns", kind="stable")


def kept_of(trace):
    """Return how much of what each launch wrote its GPU's cache still held at its end."""
    device, work = trace.meta.device, find_row_work(trace)
    return kept_bytes(device, work.written, np.maximum(work.bytes, 0)) if device else 0


def cases_of(trace):
    """Return the case in which each launch was made, on whatever thread; missing outside."""
    ranges = trace.ranges
    is_case = ranges["name"].astype(str).str.startswith("case:")
    cases = ranges[is_case.to_numpy(bool)].sort_values("start_ns").drop_duplicates("start_ns")
    begin = cases["start_ns"].to_numpy(np.int64)
    end = begin + cases["duration_ns"].to_numpy(np.int64)
    names = np.append(cases["name"].astype(object).to_numpy(), None)
    launch = trace.kernels["launch_row"].to_numpy(np.int64, na_value=-1)
    moment = np.append(ranges["start_ns"].to_numpy(np.int64), -1)[launch]
    place = np.searchsorted(begin, moment, side="right") - 1
    is_inside = (place >= 0) & (moment < np.append(end, -1)[place])
    return pd.Series(names[np.where(is_inside, place, -1)], index=trace.kernels.index, dtype=object)


def score(traces):
    """Return the rows of the result, and the distinct launches whose claims are wrong."""
    launches = pd.concat([counted_launches(trace) for trace in traces], ignore_index=True)
    truth, claim = bound_by_counters(launches), as_recorded(launches)
    launches = launches.assign(truth=truth, claim=claim, ratio=traffic_ratio(launches))
    clear = launches[~is_borderline(launches)]
    distinct = clear.drop_duplicates(LAUNCH)
    rows = [
        row("distinct launches off the borders", len(distinct), "launches", "higher", ENOUGH),
        row("distinct launches on a border", num_bordering(launches), "launches", "lower"),
        right("claims right", distinct, RIGHT),
        covered("claimed, of distinct launches", distinct, COVERED_LAUNCHES),
        covered("claimed, of time", clear, COVERED_TIME, by_time=True),
        right("claims right, by time", clear, by_time=True),
    ]
    for place, name in enumerate(BOUNDS):
        claimed = distinct[distinct["claim"] == place]
        rows.append(right(f"claims of {name} right", claimed))
    for place, name in enumerate(BOUNDS):
        is_so = distinct[distinct["truth"] == place]
        rows.append(right(f"claims on launches that are {name} right", is_so))
        rows.append(covered(f"claimed, of launches that are {name}", is_so))
    for column in ("part", "seed"):
        for name, group in distinct.groupby(column, sort=True):
            rows.append(right(f"claims right, {column} {name}", group))
            rows.append(covered(f"claimed, {column} {name}", group))
    return [*rows, *about_bytes(traces, distinct)], listed(distinct)


def num_bordering(launches):
    """Return the number of distinct launches that counters put within 5 points of a border."""
    return len(launches[is_borderline(launches)].drop_duplicates(LAUNCH))


def right(name, launches, reach=None, *, by_time=False):
    """Return the share of claims that counters confirm."""
    said = launches[launches["claim"] >= 0]
    agrees = (said["claim"] == said["truth"]).to_numpy(float)
    weight = said["duration_ns"].to_numpy(float) if by_time else np.ones(len(said))
    share = float((agrees * weight).sum() / weight.sum()) if weight.sum() else None
    return row(name, share, "share", "higher", reach, claims=len(said))


def covered(name, launches, reach=None, *, by_time=False):
    """Return the share of launches, or of their time, whose bound is not unknown."""
    said = (launches["claim"] >= 0).to_numpy(float)
    weight = launches["duration_ns"].to_numpy(float) if by_time else np.ones(len(launches))
    share = float((said * weight).sum() / weight.sum()) if weight.sum() else None
    return row(name, share, "share", "higher", reach, launches=len(launches))


def about_bytes(traces, launches):
    """Return how far counted traffic is from the work's bytes, beyond the cache."""
    cache = max((find_device(t.gpus[0].name).cache_bytes or 0 for t in traces if t.gpus), default=0)
    is_large = counted_bytes(launches) > cache
    large = launches[is_large]
    least = large["bytes"].to_numpy(np.float64, na_value=np.nan)
    kept = large["kept_bytes"].to_numpy(np.float64)
    compulsory = ("compulsory bytes", least, None, None)
    expected = ("bytes less what the cache keeps", least - kept, BYTES_MEDIAN, BYTES_P90)
    rows = []
    for name, num_bytes, *reaches in (compulsory, expected):
        apart = np.abs(num_bytes / counted_bytes(large) - 1)
        known = apart[~np.isnan(apart)]
        found = np.quantile(known, (0.5, 0.9)).tolist() if len(known) else (None, None)
        of = {"launches": len(known), "without_bytes": len(large) - len(known)}
        for which, value, reach in zip(("median", "90th percentile"), found, reaches, strict=True):
            about = f"{name} off the counters, {which}"
            rows.append(row(about, value, "share", "lower", reach, **of))
    return rows


def listed(launches):
    """Return the launches whose claims are wrong, longest first."""
    wrong = launches[(launches["claim"] >= 0) & (launches["claim"] != launches["truth"])]
    wrong = wrong.sort_values("duration_ns", ascending=False).head(LISTED)
    memory, compute = counted_shares(wrong)
    return [
        {
            "case": one.case,
            "kernel": str(one.name)[:120],
            "grid": str(one.grid),
            "operator": str(one.op),
            "by_counters": BOUNDS[one.truth],
            "claimed": str(one.bound),
            "dram_share": round(float(memory[place]), 4),
            "compute_share": round(float(compute[place]), 4),
            "duration_ns": int(one.duration_ns),
            "counted_ns": None if pd.isna(one.counted_ns) else int(one.counted_ns),
            "traffic_over_bytes": None if np.isnan(one.ratio) else round(float(one.ratio), 3),
        }
        for place, one in enumerate(wrong.astype(object).itertuples(index=False))
    ]


def main():
    """Record, count, score and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="what is drawn")
    parser.add_argument("--out", type=Path, action="append", help="where runs are, or will be")
    parser.add_argument("--tiny", action="store_true", help="small, up to the counting")
    parser.add_argument("--again", type=Path, action="append", help="earlier results of the runs")
    parser.add_argument("--scored", action="store_true", help="the runs exist; score them only")
    parser.add_argument("--minutes", type=float, default=10, help="after which no case is begun")
    parser.add_argument("--result", type=Path, help="the file to write")
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    chosen = parser.parse_args()
    places = chosen.out or [Path("drawn")]
    if chosen.again or chosen.scored:
        for place in places:
            kprof_does("open", "--force", str(place / RUN))
    else:
        if len(places) > 1:
            parser.error("one run is recorded at a time: give one --out")
        places[0].mkdir(parents=True, exist_ok=True)
        record(places[0], chosen.seeds, chosen.tiny, chosen.minutes)
    traces = [kprof.load(place / RUN) for place in places]
    if chosen.tiny:
        number = cases_of(traces[0]).nunique()
        print(f"recorded {len(traces[0].ranges):,} ranges of {number} cases; nothing was counted")
        return
    write(traces, chosen)


def write(traces, chosen):
    """Score runs, print and write; earlier results tell what measured them."""
    rows, wrong = score(traces)
    before = [measured_by(result) for result in chosen.again or []] or [{}]
    write_scores(
        "bound_truth",
        "what bounds drawn kernels, claimed and by hardware counters",
        rows,
        MEASURED,
        before[-1],
        chosen,
        seeds=sorted({int(s) for t in traces for s in counted_launches(t)["seed"]}),
        ceilings=[trace.meta.device.source if trace.meta.device else None for trace in traces],
        wrong=wrong,
    )


if __name__ == "__main__":
    main()
