"""Replacement kernels beside torch's own and the installed peers', on one GPU, in one run.

python benchmarks/kernels.py [KERNEL ...] [--minutes 8]

Writes a result for each kernel, anew with every provider that is done. Each provider has a process
of its own, and a peer that breaks the capture of a graph a second one, without graphs. GPU time is
that of a CUDA graph's replay over inputs that L2 cannot hold; a share of copy is that of a copy of
the same bytes in the same process, measured again where it is not what the others' was.
"""

import argparse
import dataclasses
import datetime
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from evidence import RESULTS, row, write_evidence

from kprof.kernels import kernel_named
from kprof.kernels._bench import Timed, bench
from kprof.kernels._choice import ranking, versions_of
from kprof.timing import time_on_gpu

SOURCES = ("benchmarks/kernels.py", "kprof/kernels/*.py", "kprof/timing.py", "kprof/stopwatch.py")
OURS = "kprof"
HOST_NS = 8_000
# How far a copy may be from that of the other processes.
COPY_WITHIN = 0.05
LOSS = (8_192, 4_096, 128_256)
# Of eager's extra memory, and of the logits; the time and the rate that go with each.
MEMORY_OF_EAGER, TIME_OF_EAGER = 0.25, 1.0
MEMORY_OF_LOGITS, RATE_OF_PRODUCT = 0.05, 0.88
# Products of the recomputing path over those that are useful.
EXECUTED = 8 / 6


# Of one sequence, and such that bytes decide.
SHORT_CACHES = tuple((1, 32, 8, 1, keys, 128) for keys in (1_024, 4_096, 16_384))
BETWEEN = ((8, 32, 8, 1, 4_096, 128),)
LONG_CACHES = (
    *((1, 32, 8, 1, 131_072, 128), (32, 32, 8, 1, 4_096, 128)),
    (128, 32, 8, 1, 2_048, 128),
)


@dataclass(frozen=True)
class Reach:
    """What one kernel has to reach, as a share of copy and against the best peer."""

    kernel: str
    direction: str
    share_of_copy: float | None
    of_best_peer: float = 1.0
    shapes: tuple = ()
    """For which; empty: all that the kernel measures."""


REACHES = (
    Reach("rmsnorm", "forward", 0.93),
    Reach("add_rmsnorm", "forward", 0.92),
    Reach("add_rmsnorm", "backward", 0.88),
    Reach("rmsnorm", "backward", 0.88),
    Reach("swiglu", "forward", 0.97),
    Reach("swiglu", "backward", 0.97),
    Reach("cross_entropy", "training", 0.93),
    Reach("adamw", "forward", 0.93),
    # What is short is latency; of what is long, 0.92 of the rate of reading is 0.93 of copy.
    Reach("decode_attention", "forward", None, 1.3, SHORT_CACHES),
    Reach("decode_attention", "forward", None, 1.0, BETWEEN),
    Reach("decode_attention", "forward", 0.93, 1.0, LONG_CACHES),
)


def main():
    """Measure the kernels named, or all that have something to reach."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", nargs="*")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--minutes", type=float, default=60.0, help="of all kernels together")
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    parser.add_argument("--work", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work_off(**json.loads(args.work))
    names = args.kernels or [*dict.fromkeys(r.kernel for r in REACHES), "linear_cross_entropy"]
    ends_s = time.monotonic() + 60 * args.minutes
    has_failed = False
    for number, name in enumerate(names):
        # What is left is shared out evenly, so that no kernel goes without.
        share_s = (ends_s - time.monotonic()) / (len(names) - number)
        has_failed |= measure(name, args, time.monotonic() + share_s)
    sys.exit(int(has_failed))


def measure(name, args, ends_s):
    """Measure all providers of one kernel, ours first; return whether ours is missing somewhere."""
    kernel = kernel_named(name)
    wanted = wanted_of(kernel)
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    path = args.out / f"{name}_h200_{month}.json"
    product = product_rate(ends_s) if name == "linear_cross_entropy" else None
    done = {}
    # Should time run out, then for those that are known to be slow.
    for provider in sorted(kernel.providers, key=lambda one: one.name in last_of(name)):
        for one in in_processes(name, provider.name, wanted, ends_s):
            done[one.direction, one.shape, one.provider] = one
            print(line_of(one), flush=True)
        rows = rows_of_all(kernel, wanted, done, product)
        versions = versions_of(kernel.providers)
        write_evidence(path, name, rows, SOURCES, commit=args.commit, versions=versions)
    again = odd_copies(done)
    for key in again:
        direction, shape, provider = key
        for one in in_processes(name, provider, [(direction, shape)], ends_s):
            print("again:", line_of(one), flush=True)
            done[key] = one if one.gpu_ns else done[key]
    if again:
        rows = rows_of_all(kernel, wanted, done, product)
        write_evidence(path, name, rows, SOURCES, commit=args.commit, versions=versions)
    return any(done[(*one, OURS)].gpu_ns is None for one in wanted)


def last_of(name):
    """Return the providers that are measured last."""
    return ("inductor",) if name == "linear_cross_entropy" else ("inductor", "eager")


def wanted_of(kernel):
    """Return direction and shape of all that is measured of a kernel."""
    if kernel.name == "linear_cross_entropy":
        return [("training", LOSS)]
    directions = dict.fromkeys(one.direction for one in REACHES if one.kernel == kernel.name)
    return [(direction, shape) for direction in directions for shape in kernel.shapes]


def odd_copies(done):
    """Return whose copy took another time than the others' of the same bytes."""
    copies = {}
    for (direction, shape, _), one in done.items():
        if one.copy_ns:
            copies.setdefault((direction, shape), []).append(one.copy_ns)
    usual = {place: statistics.median(taken) for place, taken in copies.items()}
    return [
        key
        for key, one in done.items()
        if one.copy_ns and abs(one.copy_ns / usual[key[:2]] - 1) > COPY_WITHIN
    ]


def in_processes(name, provider, wanted, ends_s):
    """Yield what a process of its own measured; after a broken capture, of another without."""
    left, is_in_graph = list(wanted), True
    while left:
        work = {"name": name, "provider": provider, "wanted": left, "is_in_graph": is_in_graph}
        problem = ""
        for one in lines_of(work, ends_s):
            if "captur" in one.problem and is_in_graph:
                # This and the rest once more, without graphs.
                is_in_graph = False
                break
            left.pop(0)
            yield one
            if is_spoilt(one):
                break
        else:
            problem = "out of time" if time.monotonic() >= ends_s else "the process ended early"
        if problem and left:
            direction, shape = left.pop(0)
            yield Timed(name, provider, tuple(shape), "bfloat16", direction, problem=problem)


def is_spoilt(one):
    """Tell whether a process can measure nothing more after this."""
    return "CUDA error" in one.problem or "captur" in one.problem


def lines_of(work, ends_s):
    """Yield what a process says it measured, until it ends or its time does."""
    left_s = ends_s - time.monotonic()
    if left_s <= 0:
        return
    command = [sys.executable, __file__, "--work", json.dumps(work)]
    command = ["timeout", "--kill-after=5", f"{left_s:.0f}", *command]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        for line in process.stdout:
            if line.startswith("{"):
                told = json.loads(line)
                yield Timed(**{**told, "shape": tuple(told["shape"])})
    finally:
        process.terminate()
        process.wait()


def work_off(name, provider, wanted, is_in_graph):
    """Measure one provider and say it, a line each."""
    if provider is None:
        print(json.dumps({"product": rate_of_product()}), flush=True)
        return
    kernel = kernel_named(name)
    who = [kernel.provider(provider)]
    for direction, shape in wanted:
        shape = tuple(shape)
        for one in bench(kernel, shape, "bfloat16", direction, who, is_in_graph=is_in_graph):
            print(json.dumps(dataclasses.asdict(one)), flush=True)
            if is_spoilt(one):
                return


def product_rate(ends_s):
    """Return the rate of a product, measured in a process of its own."""
    work = {"name": None, "provider": None, "wanted": [], "is_in_graph": False}
    command = [sys.executable, __file__, "--work", json.dumps(work)]
    left_s = max(1.0, ends_s - time.monotonic())
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=left_s)
    return json.loads(done.stdout.splitlines()[-1])["product"]


def line_of(one):
    """Return what a provider reached, in a line."""
    what = f"{one.kernel}-{one.direction}-{'x'.join(map(str, one.shape))}"
    shown = one.problem or (
        f"{one.gpu_ns / 1e3:9.1f} us {one.bytes_per_s / 1e12:6.3f} TB/s "
        f"{one.share_of_copy:6.3f} of copy, host {(one.host_ns or 0) / 1e3:5.1f} us, "
        f"extra {one.extra_bytes / 1e9:.2f} GB{'' if one.is_in_graph else ', not in a graph'}"
    )
    return f"{what:40} {one.provider:10} {shown[:140]}"


def rows_of_all(kernel, wanted, done, product):
    """Return the rows of what is done so far."""
    if kernel.name == "linear_cross_entropy":
        return rows_of_losses([done[key] for key in done], product)
    rows = []
    for direction, shape in wanted:
        (reach,) = [
            r
            for r in REACHES
            if (r.kernel, r.direction) == (kernel.name, direction)
            and (not r.shapes or shape in r.shapes)
        ]
        rows += rows_of(
            reach, shape, [one for key, one in done.items() if key[:2] == (direction, shape)]
        )
    return rows


def rows_of(reach, shape, measured):
    """Return the rows of one shape."""
    what = f"{reach.kernel}-{reach.direction}-{'x'.join(map(str, shape))}"
    rows = []
    for one in measured:
        if one.provider != OURS:
            rows.append(
                row(
                    f"{what}-{one.provider}",
                    one.share_of_copy,
                    "of copy",
                    "higher",
                    gpu_ns=one.gpu_ns,
                    host_ns=one.host_ns,
                    copy_ns=one.copy_ns,
                    is_in_graph=one.is_in_graph,
                    problem=one.problem,
                )
            )
    ours = next((one for one in measured if one.provider == OURS), None)
    if ours is None:
        return rows
    peers = [one for one in ranking(measured) if one.provider != OURS]
    best = peers[0] if peers else None
    rows.append(
        row(
            what,
            ours.share_of_copy,
            "of copy",
            "higher",
            reach.share_of_copy,
            gpu_ns=ours.gpu_ns,
            host_ns=ours.host_ns,
            spread=ours.spread,
            copy_ns=ours.copy_ns,
            problem=ours.problem,
            shape=list(shape),
        )
    )
    if best is not None and ours.gpu_ns:
        ratio = best.gpu_ns / ours.gpu_ns
        rows.append(
            row(
                f"{what}-to-best",
                ratio,
                "x",
                "higher",
                reach.of_best_peer,
                peer=best.provider,
                peer_value=best.share_of_copy,
            )
        )
    if ours.host_ns is not None:
        rows.append(row(f"{what}-host", ours.host_ns, "ns", "lower", HOST_NS))
    return rows


def rows_of_losses(measured, product):
    """Return the rows of linear + cross-entropy: time and memory of each, the product's rate."""
    by_name = {one.provider: one for one in measured}
    logits_bytes = 2 * LOSS[0] * LOSS[2]
    rows = [row("product", product, "FLOP/s", "higher")]
    for one in measured:
        rows.append(
            row(
                f"{one.provider}-time",
                one.gpu_ns,
                "ns",
                "lower",
                problem=one.problem,
                extra_bytes=one.extra_bytes,
                flops_per_s=one.flops_per_s,
                is_in_graph=one.is_in_graph,
            )
        )
    eager, fast, lean = (by_name.get(one) for one in ("eager", OURS, f"{OURS}-lean"))
    if fast and eager and fast.gpu_ns and eager.gpu_ns:
        rows.append(
            row("fast-time", fast.gpu_ns / eager.gpu_ns, "of eager", "lower", TIME_OF_EAGER)
        )
        memory = fast.extra_bytes / eager.extra_bytes
        rows.append(row("fast-memory", memory, "of eager", "lower", MEMORY_OF_EAGER))
    if lean and lean.gpu_ns:
        rate = EXECUTED * lean.flops_per_s / product
        rows.append(row("lean-rate", rate, "of product", "higher", RATE_OF_PRODUCT))
        memory = lean.extra_bytes / logits_bytes
        rows.append(row("lean-memory", memory, "of logits", "lower", MEMORY_OF_LOGITS))
    return rows


def rate_of_product(size=8_192):
    """Return what a square product of random bf16 matrices reaches in this run, in FLOP/s."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    took = time_on_gpu(lambda: torch.mm(a, b, out=out), sample_ns=2e7)
    return 2 * size**3 / took.median_ns * 1e9


if __name__ == "__main__":
    main()
