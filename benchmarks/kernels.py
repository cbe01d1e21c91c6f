"""Replacement kernels beside torch's own and the installed peers', on one GPU, in one run.

python benchmarks/kernels.py [KERNEL ...] [--minutes 8]

Writes a result for each kernel, anew with every shape that is done. Each provider has a process of
its own, and a peer that breaks the capture of a graph a second one, without graphs; all processes
compile beside each other, then measure one after the other. GPU time is that of a CUDA graph's
replay over inputs that L2 cannot hold; a share of copy is that of a copy of the same bytes, which
two processes measure, and all where those two do not agree. Where ours and the best peer are close,
both are measured twice more in turn, and the middle one of each counts. With --prepare all is
compiled, and nothing measured.
"""

import argparse
import datetime
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from evidence import RESULTS, write_evidence
from kernel_reaches import kernels_to_reach, rows_of_all, table_of, wanted_of
from kernel_timers import timers_of, work_off

from kprof.kernels import OURS, kernel_named
from kprof.kernels.bench.choice import ranking, versions_of

SOURCES = (
    "benchmarks/kernels.py",
    "benchmarks/kernel_reaches.py",
    "benchmarks/kernel_timers.py",
    "benchmarks/workers.py",
    "kprof/timing.py",
    "kprof/timing.py",
)
# How far the copies of two processes may be apart.
COPY_WITHIN = 0.05
# Two providers that are no farther apart are measured so many times more.
CLOSE, REPEATS = 0.03, 2
# Of the time, in shapes, beside that of its shapes: few calls of these take as long as many others.
SHARES = {"linear_cross_entropy": 12, "adamw": 6}
LEAST_SHARE = 2
# Of what was measured since then, no more than this is lost.
WRITTEN_EVERY_S = 15


def main():
    """Measure the kernels named, or all that have something to reach."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", nargs="*")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--minutes", type=float, default=60.0, help="of all kernels together")
    parser.add_argument("--at-once", type=int, default=8, help="processes that compile")
    parser.add_argument("--prepare", action="store_true", help="compile, and measure nothing")
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    parser.add_argument("--work", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work_off(**json.loads(args.work))
    names = args.kernels or kernels_to_reach()
    ends_s = time.monotonic() + 60 * args.minutes
    timers = {name: timers_of(kernel_named(name)) for name in names}
    with ThreadPoolExecutor(args.at_once) as pool:
        everyone = [one for each in timers.values() for one in each.values()]
        list(pool.map(lambda one: one.start(ends_s), everyone))
    has_failed = False
    for number, name in enumerate(() if args.prepare else names):
        # What is left is shared out by what there is to measure, so that no kernel goes without.
        left = [
            SHARES.get(one, LEAST_SHARE) + len(wanted_of(kernel_named(one)))
            for one in names[number:]
        ]
        share_s = (ends_s - time.monotonic()) * left[0] / sum(left)
        has_failed |= measure(name, timers[name], args, time.monotonic() + share_s)
        for one in timers[name].values():
            one.stop()
    for one in everyone:
        one.stop()
    sys.exit(int(has_failed))


def measure(name, timers, args, ends_s):
    """Measure all providers of one kernel, shape by shape; return whether ours misses some."""
    kernel = kernel_named(name)
    wanted = wanted_of(kernel)
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    path = args.out / f"{name}_h200_{month}.json"
    product = None
    if name == "linear_cross_entropy":
        product = (timers[OURS].ask({"product": True}, ends_s) or {}).get("product")
    done, written_s = {}, time.monotonic()
    for direction, shape in wanted:
        done |= measured_of(timers, direction, shape, ends_s)
        if (direction, shape) == wanted[-1] or time.monotonic() > written_s + WRITTEN_EVERY_S:
            rows = rows_of_all(kernel, done, product)
            about = {"commit": args.commit, "versions": versions_of(kernel.providers)}
            write_evidence(path, name, rows, sources_of(name), **about)
            written_s = time.monotonic()
    print(table_of(rows), flush=True)
    return any(done[(*one, OURS)].gpu_ns is None for one in wanted)


def measured_of(timers, direction, shape, ends_s):
    """Return what each provider took for one shape, by direction, shape and provider."""
    found = {name: [] for name in timers}

    def measure_one(name):
        copy_ns = agreed_copy(middles(found))
        one = timers[name].measure(direction, shape, copy_ns, ends_s)
        print(line_of(one), flush=True)
        return one

    for name in timers:
        found[name].append(measure_one(name))
    for name in odd_copies(middles(found)):
        before = found[name]
        found[name] = []
        again = measure_one(name)
        found[name] = before if again.gpu_ns is None else [again]
    for name in REPEATS * close_ones(middles(found)):
        found[name].append(measure_one(name))
    return {(direction, shape, name): one for name, one in middles(found).items()}


def middles(found):
    """Return of each provider the measurement in the middle; of two, the shorter one."""
    return {name: _middle(times) for name, times in found.items() if times}


def _middle(times):
    usable = sorted((one for one in times if one.gpu_ns is not None), key=lambda one: one.gpu_ns)
    return usable[(len(usable) - 1) // 2] if usable else times[0]


def close_ones(measured):
    """Return ours and the best peer where they are close to each other."""
    ranked = [one for one in ranking(measured.values()) if one.is_in_graph]
    ours = next((one for one in ranked if one.provider == OURS), None)
    best = next((one for one in ranked if not one.provider.startswith(OURS)), None)
    if ours is None or best is None or abs(best.gpu_ns / ours.gpu_ns - 1) > CLOSE:
        return ()
    return (OURS, best.provider)


def agreed_copy(measured):
    """Return how long a copy takes on which two processes agree; None where they do not yet."""
    copies = [one.copy_ns for one in measured.values() if one.copy_ns]
    if len(copies) < 2 or max(copies) > min(copies) * (1 + COPY_WITHIN):
        return None
    return statistics.median(copies)


def odd_copies(measured):
    """Return whose copy took another time than the others' of the same bytes."""
    copies = [one.copy_ns for one in measured.values() if one.copy_ns]
    usual = statistics.median(copies) if copies else None
    return [
        name
        for name, one in measured.items()
        if one.copy_ns and abs(one.copy_ns / usual - 1) > COPY_WITHIN
    ]


def sources_of(name):
    """Return what a kernel's result depends on."""
    return (*SOURCES, f"kprof/kernels/{name}.py")


def line_of(one):
    """Return what a provider reached, in a line."""
    what = f"{one.kernel}-{one.direction}-{'x'.join(map(str, one.shape))}"
    host = "" if one.host_ns is None else f"host {one.host_ns / 1e3:5.1f} us, "
    shown = one.problem or (
        f"{one.gpu_ns / 1e3:9.1f} us {one.bytes_per_s / 1e12:6.3f} TB/s "
        f"{one.share_of_copy:6.3f} of copy, {host}"
        f"extra {one.extra_bytes / 1e9:.2f} GB{'' if one.is_in_graph else ', not in a graph'}"
    )
    return f"{what:40} {one.provider:10} {shown[:140]}"


if __name__ == "__main__":
    main()
