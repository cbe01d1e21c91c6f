"""How much of the time that CUDA graphs replay gets its operator's name, module and work.

    python benchmarks/replayed.py

records `generate` with a static cache, a training step in one graph, and one whose optimizer stays
outside; writes `results/replayed_<gpu>_<yyyy-mm>.json` anew after each. `--again RESULT` analyzes
and scores the runs of an earlier result anew, anywhere; `--tiny` tries the way on a machine without
a GPU, where nothing is replayed.
"""

from __future__ import annotations

import argparse
import datetime
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from evidence import RESULTS, ROOT, describe_gpu, measured_by, row, write_evidence

import kprof
from kprof.analyze.attribution.ledger import is_graph_launch_name

WORKLOADS = {
    "generate, static cache": ("replayed/static_cache.py", ("--skip", "5", "--steps", "2")),
    "whole step": ("replayed/whole_step.py", ("--skip", "10", "--steps", "5")),
    "forward and backward": ("cudagraph.py", ("--skip", "10", "--steps", "3")),
}
SOURCES = (
    "benchmarks/replayed.py",
    *(f"benchmarks/workloads/{path}" for path, _ in WORKLOADS.values()),
    "kprof/analyze/**/*.py",
    "kprof/collect/**/*.py",
)
# The installed program, as users have it, not this working tree.
KPROF = shutil.which("kprof") or str(Path(sys.executable).parent / "kprof")
REACH = 0.95
MOST_SECONDS = 240


def record(name, folder, tiny):
    """Run a workload under kprof; return its trace."""
    path, options = WORKLOADS[name]
    run = folder / f"{Path(path).stem}.kprof"
    script = [f"benchmarks/workloads/{path}", *(["--tiny"] if tiny else [])]
    subprocess.run(
        [KPROF, "run", "--force", *options, "--out", str(run), *script],
        cwd=ROOT,
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        timeout=MOST_SECONDS,
    )
    return kprof.load(run)


def open_again(name, folder):
    """Analyze the run of a workload that is there; return its trace."""
    run = folder / f"{Path(WORKLOADS[name][0]).stem}.kprof"
    command = [KPROF, "open", "--force", str(run)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return kprof.load(run)


def replayed_rows(trace):
    """Return which activities a graph's replay launched."""
    names = trace.ranges["name"].cat
    is_launch = np.append(is_graph_launch_name(names.categories), False)[names.codes.to_numpy()]
    launch = trace.kernels["launch_row"].to_numpy(np.int64, na_value=-1)
    return np.append(is_launch, False)[launch]


def score(name, trace):
    """Return the rows of a recording: shares of the replayed time with a name, and with work."""
    kernels = trace.kernels
    replayed = kernels[replayed_rows(trace)]
    time_ns = replayed["duration_ns"].to_numpy(np.int64)
    total_ns = int(time_ns.sum())
    by = replayed["attributed_by"].astype(object).fillna("nobody")
    how = {
        str(key): int(ns)
        for key, ns in replayed["duration_ns"].groupby(by.to_numpy()).sum().items()
    }
    more = {
        "replayed_ns": total_ns,
        "recorded_ns": int(kernels["duration_ns"].sum()),
        "activities": len(replayed),
        "named_by_ns": how,
        "caveats": [one.text for one in trace.meta.caveats],
    }
    rows = []
    for column, reach in (("op", REACH), ("module", None), ("bytes", REACH)):
        named_ns = int(time_ns[replayed[column].notna().to_numpy(bool)].sum())
        share = named_ns / total_ns if total_ns else None
        title = {"op": "operator", "module": "module", "bytes": "known work"}[column]
        rows.append(row(f"{name}: {title}", share, "share of time", "higher", reach, **more))
        more = {}
    return rows


def main():
    """Record each workload and say how much of what was replayed has a name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--out", type=Path, help="folder for the runs [default: none are kept]")
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU; no result")
    parser.add_argument("--again", type=Path, help="an earlier result of the runs in --out")
    parser.add_argument("--result", type=Path, help="the file to write")
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    args = parser.parse_args()
    before = measured_by(args.again)
    gpu = {**describe_gpu(), **before}["gpu"]
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    short = re.sub(r"nvidia|\W", "", (gpu or "cpu").lower())
    path = args.result or RESULTS / f"replayed_{short}_{month}.json"
    what = "time that CUDA graphs replayed: the share with a name"
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.out or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for name in args.names:
            try:
                found = open_again(name, folder) if before else record(name, folder, args.tiny)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                print(f"{name}: could not be recorded: {error}", flush=True)
                continue
            scored = score(name, found)
            rows += scored
            for entry in scored:
                told = "met" if entry["met"] else "-" if entry["met"] is None else "NOT MET"
                how = entry.get("named_by_ns", "")
                print(f"{entry['name']:44s} {entry['value']}  {told}  {how}", flush=True)
            if gpu is not None and not args.tiny:
                write_evidence(path, what, rows, SOURCES, commit=args.commit, **before)
    return 0 if len(rows) == 3 * len(args.names) else 1


if __name__ == "__main__":
    sys.exit(main())
