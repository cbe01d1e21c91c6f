"""FP8 products and linear layers beside torch's own and the installed peers', on one GPU.

python benchmarks/fp8.py [fp8_linear | fp8_gemm ...] [--minutes 6]

Each provider is measured in a process of its own, by replays of a CUDA graph over weights that L2
cannot hold. What counts for the linear layer: that it is never slower than whoever is fastest, how
much faster it is than the better of DeepGEMM, cast included, and torchao compiled, and than bf16.
"""

import argparse
import dataclasses
import datetime
import json
import math
import subprocess
import sys
import time
from pathlib import Path

from evidence import RESULTS, row, write_evidence

from kprof.kernels import OURS, kernel_named
from kprof.kernels._bench import Timed, bench
from kprof.kernels._choice import versions_of

SOURCES = (
    *("benchmarks/fp8.py", "kprof/kernels/*fp8*.py", "kprof/kernels/_bench.py"),
    *("kprof/timing.py", "kprof/stopwatch.py"),
)
KERNELS = ("fp8_linear", "fp8_gemm")
# Of the fastest provider's speed, on any shape; of the better peer's, over all shapes.
NEVER_BELOW, OF_PEERS = 0.98, 1.25
# Of bf16, for many rows; and the share of shapes with few rows where our own kernel is fastest.
OF_BF16, MANY_ROWS = 1.6, 2_048
FASTEST_SHARE, FEW_ROWS = 0.5, 128
PEERS = ("deep-gemm", "torchao")
OWN = (OURS, f"{OURS}-wide", f"{OURS}-tiles")


def main():
    """Measure the kernels named, or both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", nargs="*", default=KERNELS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--minutes", type=float, default=6.0, help="of all kernels together")
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work_off(*args.work)
        return
    ends_s = time.monotonic() + 60 * args.minutes
    for number, name in enumerate(args.kernels):
        share_s = (ends_s - time.monotonic()) / (len(args.kernels) - number)
        measure(name, args, time.monotonic() + share_s)


def measure(name, args, ends_s):
    """Measure all providers of one kernel; its result is written anew after each."""
    kernel = kernel_named(name)
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    done = {}
    for number, provider in enumerate(kernel.providers):
        share_s = (ends_s - time.monotonic()) / (len(kernel.providers) - number)
        for one in measured_apart(name, provider.name, share_s):
            done[one.shape, one.provider] = one
            time_of = one.problem[:100] or f"{one.gpu_ns / 1e3:8.2f} us"
            print(f"{name} {'x'.join(map(str, one.shape)):18} {one.provider:12} {time_of}")
        path = args.out / f"{name}_h200_{month}.json"
        rows = rows_of(kernel, done)
        versions = versions_of(kernel.providers)
        write_evidence(path, name, rows, SOURCES, commit=args.commit, versions=versions)


def measured_apart(name, provider, limit_s):
    """Yield what a process of its own measured of one provider."""
    command = ["timeout", "--kill-after=5", f"{max(limit_s, 1):.0f}", sys.executable, __file__]
    command += ["--work", name, provider]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("{"):
            told = json.loads(line)
            yield Timed(**{**told, "shape": tuple(told["shape"])})
    process.wait()


def work_off(name, provider):
    """Measure one provider on all shapes, fewest rows first, and say it, a line each."""
    kernel = kernel_named(name)
    for shape in sorted(kernel.shapes):
        for one in bench(kernel, shape, "bfloat16", "forward", [kernel.provider(provider)]):
            print(json.dumps(dataclasses.asdict(one)), flush=True)


def rows_of(kernel, done):
    """Return a row for each measurement, then what they come to together."""
    times = {key: one.gpu_ns for key, one in done.items() if one.gpu_ns}
    rows = [
        row(
            f"{'x'.join(map(str, shape))}-{provider}",
            one.gpu_ns,
            "ns",
            "lower",
            host_ns=one.host_ns,
            spread=one.spread,
            flops_per_s=one.flops_per_s,
            bytes_per_s=one.bytes_per_s,
            problem=one.problem,
        )
        for (shape, provider), one in done.items()
    ]
    return rows + rows_of_reach(kernel, times)


def rows_of_reach(kernel, times):
    """Return how far ours is from what it has to reach, over the shapes that all have measured."""
    shapes = [shape for shape in kernel.shapes if (shape, OURS) in times]

    def of(shape, names):
        return min((times[shape, one] for one in names if (shape, one) in times), default=None)

    everyone = [one.name for one in kernel.providers]
    to_best = {shape: of(shape, everyone) / times[shape, OURS] for shape in shapes}
    to_peers = [of(shape, PEERS) / times[shape, OURS] for shape in shapes if of(shape, PEERS)]
    many = [shape for shape in shapes if shape[0] >= MANY_ROWS and (shape, "eager") in times]
    to_bf16 = [times[shape, "eager"] / times[shape, OURS] for shape in many]
    few = [shape for shape in shapes if shape[0] <= FEW_ROWS]
    others = [one for one in everyone if one not in OWN]
    own = [of(shape, OWN) <= (of(shape, others) or math.inf) for shape in few]
    rows = []
    if to_best:
        worst = min(to_best, key=to_best.get)
        where = "x".join(map(str, worst))
        rows.append(row("to-best", to_best[worst], "x", "higher", NEVER_BELOW, shape=where))
    if to_peers:
        rows.append(row("to-peers", mean_of(to_peers), "x", "higher", OF_PEERS, peers=PEERS))
    if to_bf16 and kernel.name == "fp8_linear":
        rows.append(row("to-bf16", min(to_bf16), "x", "higher", OF_BF16))
    if own:
        share = sum(own) / len(own)
        rows.append(row("own-fastest", share, "of shapes", "higher", FASTEST_SHARE))
    return rows


def mean_of(ratios):
    """Return their geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


if __name__ == "__main__":
    main()
