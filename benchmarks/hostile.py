"""Run every hostile workload without and with the recorder, compare, and write what came of it.

    python benchmarks/hostile.py            on the CPU, whatever else there is
    python benchmarks/hostile.py --gpu      the same scripts on the GPUs, and those that need them
    python benchmarks/hostile.py --servers  servers only, each 20 times under `faulthandler`

The workloads are those of `tests/hostile/`; what is compared says `tests/hostility.py`. Names of
workloads after the options run only those, and write no result where none is named. The result is
written again after every workload, and lists what is missing of it.
"""

import argparse
import contextlib
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from evidence import RESULTS, ROOT, row, write_evidence

sys.path.insert(0, str(ROOT))
from tests.hostility import differences, find_missing, observe, workloads

SOURCES = (
    "benchmarks/hostile.py",
    "tests/hostility.py",
    "tests/hostile/**/*.py",
    "kprof/collect/recorder/**/*.py",
    "kprof/collect/launch.py",
)
SERVERS = "server_"
TIMES_OF_SERVERS = 20
# An exit code above is of a process that a signal ended.
SIGNALS = 128
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def judge(workload, environment, times, *, on_gpu):
    """Return one workload's row: how many differences there are, None where it cannot run."""
    if times > 1:
        environment = {**(environment or {}), "PYTHONFAULTHANDLER": "1"}
    missing = find_missing(workload, on_gpu=on_gpu)
    start = time.perf_counter()
    found, counts = None, {}
    if missing is None:
        found, runs = [], []
        for _ in range(times):
            with tempfile.TemporaryDirectory() as folder:
                runs.append(observe(workload, Path(folder), environment))
            found += differences(workload, runs[-1])
        counts = counts_of(runs)
    state = f"needs {missing}" if found is None else "DIFFERS" if found else "same"
    took_s = time.perf_counter() - start
    print(
        "\n    ".join([f"{workload.name:28} {state} ({took_s:.1f} s)", *(found or [])]), flush=True
    )
    return row(
        workload.name,
        None if found is None else len(found),
        "differences",
        "lower",
        0,
        hostility=workload.hostility,
        command=workload.command,
        **counts,
        load=os.getloadavg()[0],
        differences=found,
        missing=missing,
    )


def counts_of(runs):
    """Return how many runs there were, and how many the recorder ended or changed."""
    return {
        "runs": len(runs),
        "deaths": sum(is_death(seen.recorded) and not is_death(seen.plain) for seen in runs),
        "changed_results": sum(seen.plain != seen.recorded for seen in runs),
    }


def is_death(ending):
    """Tell whether a signal ended a process, or its time limit did."""
    return ending.exit_code is None or ending.exit_code > SIGNALS


def main():
    """Run, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="only workloads whose name begins so")
    parser.add_argument("--gpu", action="store_true", help="let the workloads see the GPUs")
    parser.add_argument("--servers", action="store_true", help="only servers, each 20 times")
    parser.add_argument("--at-once", type=int, default=1, help="workloads at the same time")
    where = "RESULTS/hostile_<gpu|cpu>_2026-11.json"
    parser.add_argument("--result", type=Path, help=f"[default: {where}]")
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    args = parser.parse_args()
    environment = None if args.gpu else WITHOUT_GPU
    names = [*args.names, SERVERS] if args.servers else args.names
    times = TIMES_OF_SERVERS if args.servers else 1
    chosen = [w for w in workloads() if w.name.startswith(tuple(names) or "")]
    path = args.result
    if path is None and not args.names:
        what = "hostile_servers" if args.servers else "hostile"
        path = RESULTS / f"{what}_{'gpu' if args.gpu else 'cpu'}_2026-11.json"
    rows = []
    with ThreadPoolExecutor(args.at_once) as pool:
        judged = [
            pool.submit(judge, workload, environment, times, on_gpu=args.gpu) for workload in chosen
        ]
        for done in as_completed(judged):
            rows.append(done.result())
            if path is not None:
                write_result(path, rows, chosen, args.commit)
    run = [one for one in rows if one["value"] is not None]
    same = sum(one["value"] == 0 for one in run)
    print(f"{same} of {len(run)} workloads behave alike; {len(rows) - len(run)} cannot run here")
    if path is not None:
        print(f"result: {path}")


def write_result(path, rows, chosen, commit):
    """Write the rows so far, in the workloads' order, and the names of those still to come."""
    names = [workload.name for workload in chosen]
    ordered = sorted(rows, key=lambda one: names.index(one["name"]))
    same = sum(one["value"] == 0 for one in rows)
    num_run = sum(one["value"] is not None for one in rows)
    counts = {name: sum(one.get(name, 0) for one in rows) for name in counts_of([])}
    alike = row("alike", same, "workloads", "higher", num_run, **counts)
    still_to_come = sorted(set(names) - {one["name"] for one in rows})
    title = "what hostile workloads feel of the recorder"
    with contextlib.redirect_stdout(None):
        write_evidence(
            path, title, [*ordered, alike], SOURCES, commit=commit, still_to_come=still_to_come
        )


if __name__ == "__main__":
    main()
