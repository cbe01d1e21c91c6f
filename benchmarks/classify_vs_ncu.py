"""Check what kprof says bounds a kernel against hardware counters, on a GPU with Nsight Compute.

    python benchmarks/classify_vs_ncu.py --out counted

measures the ceilings (`kprof roofline`), records one workload of training, decoding, convolutions,
attention, FP8 and fused kernels (`kprof run`), counts every kernel of a step of it (`kprof ncu`:
clocks left alone, caches flushed before each launch), and writes
`benchmarks/results/classify_vs_ncu_<gpu>_<yyyy-mm>.json`. On an H200 that takes minutes; after
`--minutes` the step being counted leaves out the parts that it has not begun.

Distinct launches are those of one kernel over one grid in one part of the workload; the first of
each counts. The work model is asked twice what bounds them: in the run that was counted (its
durations, caches empty at the start), which is what counters can confirm; and in the recorded run,
as kprof shows it, whose caches the workload had filled. Agreement is also given for two halves of
the launches, drawn by a hash of their names, and for those of which no cache kept any part.
The workload imports kprof: installed, or on PYTHONPATH. `--again RESULT` analyzes and scores the
run of an earlier result anew, anywhere; `--tiny` tries the way on a CPU, up to the counting.
Counting may end before every part was reached; `--parts` names those to count, and
`--out A --again A.json --out B --again B.json` scores several runs together. What more than one of
them counted is taken from the last.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
from evidence import RESULTS, describe_gpu, measured_by, row, write_evidence

import kprof
from kprof.analyze.roofline.agreement import (
    as_recorded,
    by_work,
    compare_bounds,
    is_borderline,
    is_kept_in_cache,
    traffic_ratio,
)
from kprof.analyze.roofline.bound import BOUNDS, bound_by_counters
from kprof.analyze.roofline.hardware_counters import counted_bytes, counted_shares
from kprof.device import find_device

WORKLOAD = Path(__file__).resolve().parent / "workloads" / "counted" / "loop.py"
STEPS_BEFORE = 3
EVERYTHING, MOST_LAUNCHES = "2000", "6000"
# What the workload calls the moment, in seconds since 1970, after which it begins no other part.
UNTIL = "COUNTED_UNTIL"
# What is left to do after the last part: writing, exporting and reading the report.
AFTERWARDS_S = 45
PARTS = ("training", "decode", "convolution", "attention", "fp8", "fused", "moving")
LAUNCH = ["name", "grid", "block", "part"]
ENOUGH_LAUNCHES, AGREEING, BYTES_APART, BEATEN = 200, 0.95, 0.1, 0.02
LISTED = 60
RUN = "counted.kprof"
# What an earlier result says of its run.
OF_A_RUN = ("measured_at_commit", "date", "driver", "clocks")
MEASURED = (
    "kprof/analyze/**/*.py",
    "kprof/analyze/work/*.py",
    "kprof/collect/**/*.py",
    "kprof/opened.py",
    "benchmarks/classify_vs_ncu.py",
    "benchmarks/workloads/counted/loop.py",
)


def record(out, tiny, minutes, parts):
    """Record and count the workload; return its run folder."""
    began = time.time()
    folder = out / RUN
    script = [str(WORKLOAD), *(["--tiny"] if tiny else []), "--parts", *parts]
    options = ["--skip", str(STEPS_BEFORE), "--steps", "1", "--force", "--out", str(folder)]
    if not tiny:
        kprof_does("roofline")
    kprof_does("run", *options, *script)
    if tiny:
        return folder
    until = began + 60 * minutes - AFTERWARDS_S
    counting = ["ncu", str(folder), "--kernels", EVERYTHING, "--launches", MOST_LAUNCHES]
    kprof_does(*counting, until=until)
    return folder


def kprof_does(*words, until=None):
    """Run a command of kprof, which must not fail; say what it took."""
    began = time.monotonic()
    environment = os.environ | ({} if until is None else {UNTIL: str(until)})
    subprocess.run(
        [sys.executable, "-m", "kprof", *words],
        env=environment,
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    print(f"kprof {words[0]}: {time.monotonic() - began:.0f} s", flush=True)


def distinct(trace):
    """Return the first launch of each kernel, grid and part of the workload that was counted."""
    kernels = trace.kernels.assign(part=parts_of(trace))
    counted = kernels[bound_by_counters(kernels) >= 0].sort_values("start_ns", kind="stable")
    return counted.drop_duplicates(LAUNCH)


def parts_of(trace):
    """Return the part of the workload in which each launch was made, on whatever thread."""
    ranges = trace.ranges
    parts = ranges[ranges["name"].isin(PARTS).to_numpy(bool)].sort_values("start_ns")
    begin = parts["start_ns"].to_numpy(np.int64)
    end = begin + parts["duration_ns"].to_numpy(np.int64)
    names = np.append(parts["name"].astype(object).to_numpy(), None)
    launch = trace.kernels["launch_row"].to_numpy(np.int64, na_value=-1)
    moment = np.append(ranges["start_ns"].to_numpy(np.int64), -1)[launch]
    place = np.searchsorted(begin, moment, side="right") - 1
    is_inside = (place >= 0) & (moment < np.append(end, -1)[place])
    return names[np.where(is_inside, place, -1)]


def of_all(traces):
    """Return the distinct launches of all runs; of those in more than one run, the last's."""
    launches = pd.concat([distinct(trace) for trace in traces], ignore_index=True)
    return launches.drop_duplicates(LAUNCH, keep="last")


def score(traces):
    """Return the rows of the result, and the launches whose verdicts need a look."""
    launches = of_all(traces)
    kept = is_kept_in_cache(launches)
    half = half_by_hash(launches)
    shown = as_recorded(launches)
    rows = [
        row("distinct launches", len(launches), "launches", "higher", ENOUGH_LAUNCHES),
        agreement("class agreement", launches, AGREEING),
        agreement("class agreement, one half of the launches", launches[half]),
        agreement("class agreement, the other half", launches[~half]),
        agreement("class agreement, verdict of the recorded run", launches, AGREEING, shown),
        row("distinct launches, all traffic in memory", (~kept).sum(), "launches", "higher"),
        agreement("class agreement, all traffic in memory", launches[~kept], AGREEING),
        agreement(
            "class agreement, all traffic in memory, verdict of the recorded run",
            launches[~kept],
            verdict=shown[~kept],
        ),
    ]
    for part in PARTS:
        of_part = launches[(launches["part"] == part).to_numpy(bool)]
        rows.append(agreement(f"class agreement, {part}", of_part))
    return [*rows, *about_memory(traces[-1], launches)], listed(launches)


def half_by_hash(launches):
    """Tell which launches are in the first half, however they are ordered."""
    names = zip(launches["name"], launches["grid"], launches["part"], strict=True)
    digests = (hashlib.sha256("|".join(map(str, name)).encode()).digest() for name in names)
    return np.array([digest[0] % 2 == 0 for digest in digests], dtype=bool)


def agreement(name, launches, reach=None, verdict=None):
    """Return the share of launches off the borders on which work and counters agree."""
    verdict = by_work(launches) if verdict is None else verdict
    found = compare_bounds(launches, verdict)
    more = {
        "agreeing": found.num_agreeing,
        "differing": found.num_differing,
        "borderline": found.num_borderline,
        "without_model": int((verdict < 0).sum()),
    }
    return row(name, found.share, "share", "higher", reach, **more)


def about_memory(trace, launches):
    """Return how far traffic is from the least bytes, and ceilings from being beaten."""
    least = launches["bytes"].to_numpy(np.float64, na_value=0)
    is_large = least > 2 * cache_bytes(trace)
    apart = np.abs(traffic_ratio(launches)[is_large] - 1)
    apart = apart[~np.isnan(apart)]
    share = launches["limit_ns"].to_numpy(np.float64, na_value=np.nan) / launches["duration_ns"]
    share = share.to_numpy(np.float64)
    share = share[~np.isnan(share)]
    largest = float(share.max() - 1) if len(share) else None
    median = float(np.median(apart)) if len(apart) else None
    return [
        row(
            "traffic off the least bytes, median, outside of the cache",
            median,
            "share",
            "lower",
            BYTES_APART,
            launches=len(apart),
        ),
        row(
            "ceiling beaten by at most",
            largest,
            "share",
            "lower",
            BEATEN,
            launches=len(share),
        ),
    ]


def cache_bytes(trace):
    """Return the size of the second-level cache of the GPU; nothing where it is not known."""
    known = find_device(trace.gpus[0].name) if trace.gpus else None
    return (known.cache_bytes or 0) if known else 0


def listed(launches):
    """Return launches whose verdicts differ, and borderline ones, apart."""
    counters, work = bound_by_counters(launches), by_work(launches)
    near, kept = is_borderline(launches), is_kept_in_cache(launches)
    differs = (work >= 0) & ~near & (counters != work)
    return {
        "differing": _described(launches[differs & ~kept]),
        "differing_in_a_cache": _described(launches[differs & kept]),
        "on_a_border": _described(launches[(work >= 0) & near]),
    }


def _described(launches):
    memory, compute = counted_shares(launches)
    counters, work = bound_by_counters(launches), by_work(launches)
    shown = as_recorded(launches)
    return [
        {
            "kernel": str(one.name)[:120],
            "grid": str(one.grid),
            "part": one.part,
            "operator": str(one.op),
            "by_counters": BOUNDS[counters[place]],
            "by_work": BOUNDS[work[place]],
            "in_the_recorded_run": BOUNDS[shown[place]] if shown[place] >= 0 else None,
            "dram_share": round(float(memory[place]), 4),
            "compute_share": round(float(compute[place]), 4),
            "share_of_limit": _share_of_limit(one),
            "traffic_bytes": int(counted_bytes(launches)[place]),
            "least_bytes": None if pd.isna(one.bytes) else int(one.bytes),
        }
        for place, one in enumerate(launches.astype(object).head(LISTED).itertuples(index=False))
    ]


def _share_of_limit(launch):
    if pd.isna(launch.limit_ns):
        return None
    return round(launch.limit_ns / max(launch.duration_ns, 1), 4)


def ncu_version():
    """Return the version of Nsight Compute, None where it is not here."""
    try:
        said = subprocess.run(
            ["ncu", "--version"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.search(r"Version (\S+)", said)
    return found[1] if found else None


def main():
    """Record, count, score and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, action="append", help="where runs are, or will be")
    parser.add_argument("--tiny", action="store_true", help="small, up to the counting")
    parser.add_argument("--again", type=Path, action="append", help="an earlier result of each")
    parser.add_argument("--minutes", type=float, default=30, help="after which no part is begun")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="all of them")
    parser.add_argument("--result", type=Path, help="the file to write")
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    chosen = parser.parse_args()
    places = chosen.out or [Path("counted")]
    results = chosen.again or []
    if len(places) != max(len(results), 1):
        parser.error("there must be one --again for each --out; only one run is recorded at a time")
    if results:
        for place in places:
            kprof_does("open", "--force", str(place / RUN))
    else:
        places[0].mkdir(parents=True, exist_ok=True)
        record(places[0], chosen.tiny, chosen.minutes, chosen.parts)
    traces = [kprof.load(place / RUN) for place in places]
    if chosen.tiny:
        print(f"recorded {len(traces[0].kernels):,} activities; nothing was counted")
        return
    write(traces, results, chosen)


def write(traces, results, chosen):
    """Score runs, whose earlier results, if any, tell what measured them; print and write it."""
    rows, differences = score(traces)
    before = [measured_by(result) for result in results] or [{}]
    runs = [of_a_run(*one) for one in zip(traces, before, strict=True)]
    what = "what bounds kernels, by work models and by hardware counters"
    write_scores(
        "classify_vs_ncu", what, rows, MEASURED, before[-1], chosen, runs=runs, **differences
    )


def write_scores(name, what, rows, sources, before, chosen, **more):
    """Print and write rows; `before` tells what measured the run, where that was earlier."""
    for one in rows:
        print(f"{one['name']:60s} {one['value']} (reach {one['reach']})")
    told = dict(before)
    gpu = {**describe_gpu(), **told}["gpu"]
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    short = re.sub(r"nvidia|80gb|hbm3|\W", "", (gpu or "cpu").lower())
    write_evidence(
        chosen.result or RESULTS / f"{name}_{short}_{month}.json",
        what,
        rows,
        sources,
        commit=chosen.commit,
        versions=told.pop("versions", {"ncu": ncu_version()}),
        cache_control="all: caches are flushed before each launch",
        clock_control="none",
        **more,
        **told,
    )


def of_a_run(trace, before):
    """Return what is worth knowing of one run: its parts, its ceilings, what measured it."""
    reached = set(distinct(trace)["part"])
    return {
        "parts": [part for part in PARTS if part in reached],
        "ceilings": trace.meta.device.source if trace.meta.device else None,
        **{key: before[key] for key in OF_A_RUN if key in before},
    }


if __name__ == "__main__":
    main()
