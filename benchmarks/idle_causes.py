"""Whether the causes of idle time are right: planted faults on a GPU, found or not.

    python benchmarks/idle_causes.py

runs every workload of `planted_faults.py` under `kprof run`, with its fault and without, and
compares: what the GPU is idle for longer with the fault is the fault's, and its cause is known.
Precision and recall of every cause, by time and by count, go into
`results/idle_causes_<gpu>_<yyyy-mm>.json`, which is written anew after every workload. One of each
cause comes first, and after `--minutes` no further one is begun. `--again RESULT` analyzes and
scores the runs in `--out` again, which that result is of; given more than once, for runs of several
days, each row says when its own was made. `--tiny` tries the way on a
machine without a GPU, where there are no causes to judge.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from evidence import RESULTS, ROOT, describe_gpu, measured_by, row, write_evidence
from planted_faults import CAUSES, WORKLOADS

import kprof
from kprof.analyze.attribution.ledger import balance
from kprof.errors import KprofError
from kprof.report.result import result_of

SCRIPT = "benchmarks/planted_faults.py"
SOURCES = ("benchmarks/idle_causes.py", SCRIPT, "kprof/analyze/**/*.py", "kprof/collect/**/*.py")
# The installed program, as users have it, not this working tree.
KPROF = shutil.which("kprof") or str(Path(sys.executable).parent / "kprof")
OPTIONS = ("--skip", "5", "--steps", "5", "--force")
REACH = 0.9
# Idle time that nobody is to blame for.
NOT_JUDGED = "between kernels"
# A cause counts as found in a workload when it is this much of all idle time that its fault made.
FOUND_SHARE = 0.25
# Of a step: two recordings of the same differ by as much.
NOISE_SHARE = 0.001
MOST_SECONDS = 120


def folder_of(name, folder, *, faulty):
    """Return the run folder of a workload or its twin."""
    return folder / f"{name}{'-faulty' if faulty else ''}.kprof"


def record(name, args, *, faulty):
    """Run a workload under kprof, or analyze its recording again; return the run folder."""
    run = folder_of(name, args.out, faulty=faulty)
    stacks = ["--stacks"] if CAUSES[WORKLOADS[name]][1] else []
    workload = [SCRIPT, name, *(["--faulty"] if faulty else []), *(["--tiny"] if args.tiny else [])]
    command = ["run", *OPTIONS, *stacks, "--out", str(run), *workload]
    subprocess.run(
        [KPROF, *(["open", "--force", str(run)] if args.again else command)],
        cwd=ROOT,
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        timeout=MOST_SECONDS,
    )
    return run


def idle_of(run):
    """Return a run's idle time by cause and its window, in ns a step."""
    trace = kprof.load(run)
    result = result_of(trace, balance(trace))
    steps = max(len(result["recording"]["steps_recorded"]), 1)
    causes = {cause["cause"]: cause["time_ns"] // steps for cause in result["idle"]["causes"]}
    return Counter(causes), result["ledger"]["window_ns"] // steps


def judge(name, args):
    """Return what is known of one workload and its twin."""
    (faulty, window_ns), (clean, _) = (
        idle_of(record(name, args, faulty=is_faulty)) for is_faulty in (True, False)
    )
    grown = Counter({cause: faulty[cause] - clean[cause] for cause in faulty})
    grown = +grown
    del grown[NOT_JUDGED]
    planted = CAUSES[WORKLOADS[name]][0]
    extra_ns = max(sum(faulty.values()) - sum(clean.values()), 0)
    extra_ns += max(clean[NOT_JUDGED] - faulty[NOT_JUDGED], 0)
    least_ns = max(FOUND_SHARE * sum(grown.values()), NOISE_SHARE * window_ns)
    found = [cause for cause, ns in grown.items() if ns >= least_ns]
    right_ns = min(grown[planted], extra_ns)
    share = right_ns / extra_ns if extra_ns else None
    entry = row(
        name,
        share,
        "share of the idle time that its fault makes",
        "higher",
        REACH,
        planted=planted,
        extra_idle_ns_per_step=extra_ns,
        window_ns_per_step=window_ns,
        found_ns_per_step={str(cause): ns for cause, ns in grown.items()},
        clean_ns_per_step={str(cause): ns for cause, ns in clean.items()},
        **made_by(name, args.again),
    )
    return entry, grown, found


def made_by(name, results):
    """Return when a workload's runs were made and at which commit, if an earlier result says."""
    for result in results:
        if name in {entry["name"] for entry in json.loads(result.read_text())["rows"]}:
            told = measured_by(result)
            return {key: told[key] for key in ("date", "measured_at_commit")}
    return {}


def scores(judged):
    """Return the rows of precision and recall of every planted cause, by time and by count."""
    planted, found, right = Counter(), Counter(), Counter()
    for entry, grown, causes in judged:
        cause = entry["planted"]
        planted[cause, "time"] += entry["extra_idle_ns_per_step"]
        planted[cause, "count"] += 1
        right[cause, "time"] += min(grown[cause], entry["extra_idle_ns_per_step"])
        right[cause, "count"] += cause in causes
        for each, ns in grown.items():
            found[each, "time"] += ns
        for each in causes:
            found[each, "count"] += 1
    rows = []
    for key in planted:
        for score, out_of in (("precision", found[key]), ("recall", planted[key])):
            value = right[key] / out_of if out_of else None
            name = f"{score} of {key[0]} by {key[1]}"
            rows.append(row(name, value, "share", "higher", REACH))
    return rows


def print_rows(rows):
    """Print each row's name, its value and whether it reaches what it should."""
    for entry in rows:
        value = "-" if entry["value"] is None else f"{entry['value']:.3f}"
        met = {True: "met", False: "NOT MET", None: ""}[entry["met"]]
        found = {
            cause: round(ns / 1e6, 3) for cause, ns in entry.get("found_ns_per_step", {}).items()
        }
        print(f"{entry['name']:44s} {value:>8s}  {met:8s}{found or ''}", flush=True)


def one_of_each_first(names):
    """Return the names in such an order that every cause comes before any comes again."""
    seen = Counter()
    place = {}
    for name in names:
        cause = CAUSES[WORKLOADS[name]][0]
        place[name] = seen[cause]
        seen[cause] += 1
    return sorted(names, key=place.__getitem__)


def judge_all(args):
    """Yield what is known of each workload; begin none after so many minutes."""
    began = time.monotonic()
    for name in one_of_each_first(args.names):
        if time.monotonic() - began > 60 * args.minutes:
            print(f"{name}: no time was left for it", flush=True)
            continue
        if args.again and not folder_of(name, args.out, faulty=False).is_dir():
            print(f"{name}: no run is there", flush=True)
            continue
        try:
            yield judge(name, args)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired, KprofError) as error:
            print(f"{name}: could not be recorded: {error}", flush=True)


def main():
    """Run the chosen workloads one after the other; the answer is no where a reach is not met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--out", type=Path, help="folder for the runs [default: none are kept]")
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU; no result")
    parser.add_argument(
        "--again", type=Path, action="append", default=[], help="an earlier result of runs in --out"
    )
    parser.add_argument("--result", type=Path, help="the file to write")
    parser.add_argument("--minutes", type=float, default=30, help="after which none is begun")
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    args = parser.parse_args()
    before = measured_by(args.again[-1] if args.again else None)
    gpu = {**describe_gpu(), **before}["gpu"]
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    short = re.sub(r"nvidia|\W", "", (gpu or "cpu").lower())
    path = args.result or RESULTS / f"idle_causes_{short}_{month}.json"
    what = "planted faults that make a GPU wait: is each found, and nothing else"
    judged = []
    with tempfile.TemporaryDirectory() as temporary:
        args.out = (args.out or Path(temporary)).resolve()
        args.out.mkdir(parents=True, exist_ok=True)
        for one in judge_all(args):
            judged.append(one)
            print_rows([one[0]])
            rows = [entry for entry, _, _ in judged] + scores(judged)
            if not args.tiny and gpu is not None:
                write_evidence(path, what, rows, SOURCES, commit=args.commit, **before)
    if not judged:
        return 1
    print_rows(scores(judged))
    if args.tiny or gpu is None:
        print("no GPU, or tiny: the way was tried, nothing is judged")
        return 0
    is_whole = len(judged) == len(args.names)
    return 0 if is_whole and all(entry["met"] in (True, None) for entry in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
