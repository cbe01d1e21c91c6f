"""Replacement kernels beside torch's own and the installed peers', on one GPU, in one run.

python benchmarks/kernels.py [KERNEL ...]

Writes a result for each kernel. GPU time is that of a CUDA graph's replay over inputs that L2
cannot hold; a share of copy is that of a copy of the same bytes in the same harness.
"""

import argparse
import datetime
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from evidence import RESULTS, row, write_evidence

from kprof.kernels import kernel_named
from kprof.kernels._bench import bench
from kprof.kernels._choice import ranking, versions_of
from kprof.timing import time_on_gpu

SOURCES = ("benchmarks/kernels.py", "kprof/kernels/*.py", "kprof/timing.py", "kprof/stopwatch.py")
OURS = "kprof"
HOST_NS = 8_000
LOSS = (8_192, 4_096, 128_256)
# Of eager's extra memory, and of the logits; the time and the rate that go with each.
MEMORY_OF_EAGER, TIME_OF_EAGER = 0.25, 1.0
MEMORY_OF_LOGITS, RATE_OF_PRODUCT = 0.05, 0.88
# Products of the recomputing path over those that are useful.
EXECUTED = 8 / 6


@dataclass(frozen=True)
class Reach:
    """What one kernel has to reach, as a share of copy and against the best peer."""

    kernel: str
    direction: str
    share_of_copy: float
    of_best_peer: float = 1.0


REACHES = (
    Reach("rmsnorm", "forward", 0.93),
    Reach("add_rmsnorm", "forward", 0.92),
    Reach("add_rmsnorm", "backward", 0.88),
    Reach("rmsnorm", "backward", 0.88),
    Reach("swiglu", "forward", 0.97),
    Reach("swiglu", "backward", 0.97),
    Reach("cross_entropy", "training", 0.93),
    Reach("adamw", "forward", 0.93),
)


def main():
    """Measure the kernels named, or all that have something to reach."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", nargs="*")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    args = parser.parse_args()
    names = args.kernels or [*dict.fromkeys(r.kernel for r in REACHES), "linear_cross_entropy"]
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    if len(names) > 1:
        # Each in a process of its own: a failed capture of a peer's would spoil the others.
        common = ["--out", str(args.out), *(["--commit", args.commit] if args.commit else [])]
        done = [subprocess.run([sys.executable, __file__, name, *common]) for name in names]
        sys.exit(max(abs(one.returncode) for one in done))
    for name in names:
        rows = losses() if name == "linear_cross_entropy" else shares(name)
        path = args.out / f"{name}_h200_{month}.json"
        versions = versions_of(kernel_named(name).providers)
        write_evidence(path, name, rows, SOURCES, commit=args.commit, versions=versions)


def shares(name):
    """Return the rows of a memory-bound kernel: every shape and direction, ours and the peers."""
    kernel = kernel_named(name)
    rows = []
    for reach in (one for one in REACHES if one.kernel == name):
        for shape in kernel.shapes:
            measured = list(bench(kernel, shape, "bfloat16", reach.direction))
            rows += rows_of(reach, shape, measured)
            torch.cuda.empty_cache()
    return rows


def rows_of(reach, shape, measured):
    """Return the rows of one shape and print a line for each provider."""
    what = f"{reach.kernel}-{reach.direction}-{'x'.join(map(str, shape))}"
    rows = []
    for one in measured:
        shown = one.problem or (
            f"{one.gpu_ns / 1e3:9.1f} us {one.bytes_per_s / 1e12:6.3f} TB/s "
            f"{one.share_of_copy:6.3f} of copy, host {(one.host_ns or 0) / 1e3:5.1f} us"
        )
        print(f"{what:40} {one.provider:10} {shown[:120]}", flush=True)
        if one.provider != OURS:
            rows.append(
                row(
                    f"{what}-{one.provider}",
                    one.share_of_copy,
                    "of copy",
                    "higher",
                    gpu_ns=one.gpu_ns,
                    host_ns=one.host_ns,
                    problem=one.problem,
                )
            )
    (ours,) = [one for one in measured if one.provider == OURS]
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


def losses():
    """Return the rows of linear + cross-entropy: time and memory of each, the product's rate."""
    # First: after a peer's capture that failed, nothing random can be drawn in this process.
    product = rate_of_product()
    measured = list(bench(kernel_named("linear_cross_entropy"), LOSS, "bfloat16", "training"))
    by_name = {one.provider: one for one in measured}
    eager = by_name["eager"]
    logits_bytes = 2 * LOSS[0] * LOSS[2]
    rows = [row("product", product, "FLOP/s", "higher")]
    for one in measured:
        print(f"{one.provider:16} {one.problem or (one.gpu_ns / 1e6, one.extra_bytes)}", flush=True)
        rows.append(
            row(
                f"{one.provider}-time",
                one.gpu_ns,
                "ns",
                "lower",
                problem=one.problem,
                extra_bytes=one.extra_bytes,
                flops_per_s=one.flops_per_s,
            )
        )
    fast, lean = by_name[OURS], by_name[f"{OURS}-lean"]
    if fast.gpu_ns and eager.gpu_ns:
        rows.append(
            row("fast-time", fast.gpu_ns / eager.gpu_ns, "of eager", "lower", TIME_OF_EAGER)
        )
        memory = fast.extra_bytes / eager.extra_bytes
        rows.append(row("fast-memory", memory, "of eager", "lower", MEMORY_OF_EAGER))
    if lean.gpu_ns:
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
