"""Replacement kernels beside torch's own and the installed peers', on one GPU, in one run.

python benchmarks/kernels.py [KERNEL ...] [--minutes 8]

Writes a result for each kernel, anew with every shape that is done. Each provider has a process of
its own, and a peer that breaks the capture of a graph a second one, without graphs; all processes
compile beside each other, then measure one after the other. GPU time is that of a CUDA graph's
replay over inputs that L2 cannot hold; a share of copy is that of a copy of the same bytes, which
two processes measure, and all where those two do not agree. With --prepare all is compiled, and
nothing measured.
"""

import argparse
import ast
import dataclasses
import datetime
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from evidence import RESULTS, ROOT, row, write_evidence
from workers import Worker, questions, say

from kprof.kernels import kernel_named
from kprof.kernels._bench import Timed, bench, run_once
from kprof.kernels._choice import ranking, versions_of
from kprof.timing import time_on_gpu

SOURCES = (
    "benchmarks/kernels.py",
    "benchmarks/workers.py",
    "kprof/timing.py",
    "kprof/stopwatch.py",
)
OURS = "kprof"
HOST_NS = 8_000
# How far the copies of two processes may be apart.
COPY_WITHIN = 0.05
LOSS = (8_192, 4_096, 128_256)
# Of eager's extra memory, and of the logits; the time and the rate that go with each.
MEMORY_OF_EAGER, TIME_OF_EAGER = 0.25, 1.0
MEMORY_OF_LOGITS, RATE_OF_PRODUCT = 0.05, 0.88
# Products of the recomputing path over those that are useful.
EXECUTED = 8 / 6
# These fill the GPU's memory, and so do not compile beside others.
LARGE = ("linear_cross_entropy", "adamw")
# Of the time, in shapes, beside that of its shapes: few calls of these take as long as many others.
SHARES = {"linear_cross_entropy": 12, "adamw": 6}
LEAST_SHARE = 2
# How often a process that ended is started anew.
MOST_STARTS = 2
# Of what was measured since then, no more than this is lost.
WRITTEN_EVERY_S = 15
# Should time run out, then for those that are known to be slow.
LAST = ("inductor", "eager")
# What others are held against is no peer that can be left out.
STANDARD = {"linear_cross_entropy": "eager"}


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
    of_best_peer: float | None = None
    shapes: tuple = ()
    """For which; empty: all that the kernel measures."""


REACHES = (
    Reach("rmsnorm", "forward", 0.93, 1.0),
    Reach("rmsnorm", "backward", 0.88),
    Reach("swiglu", "forward", 0.97),
    Reach("swiglu", "backward", 0.97),
    Reach("cross_entropy", "training", 0.93, shapes=((8_192, 128_256), (8_192, 32_000))),
    Reach("adamw", "forward", 0.93, 1.0),
    Reach("add_rmsnorm", "forward", 0.92),
    Reach("add_rmsnorm", "backward", 0.88),
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
    parser.add_argument("--at-once", type=int, default=8, help="processes that compile")
    parser.add_argument("--prepare", action="store_true", help="compile, and measure nothing")
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    parser.add_argument("--work", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work_off(**json.loads(args.work))
    names = args.kernels or [*dict.fromkeys(r.kernel for r in REACHES), "linear_cross_entropy"]
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


class Timer(Worker):
    """One provider of a kernel in a process of its own, which compiles, then measures when told."""

    def __init__(self, kernel, provider, wanted):
        self.kernel, self.provider = kernel, provider
        self.is_in_graph = True
        self._num_ended = 0
        wanted = [] if kernel in LARGE else wanted
        super().__init__({"name": kernel, "provider": provider, "wanted": wanted})

    def measure(self, direction, shape, copy_ns, ends_s):
        """Return what it measured; a process that can go on no more is started anew."""
        asked = {"direction": direction, "shape": shape, "copy_ns": copy_ns}
        told = self.ask({**asked, "is_in_graph": self.is_in_graph}, ends_s)
        if told is None:
            problem = "out of time" if time.monotonic() >= ends_s else "the process ended early"
            self._num_ended += 1
            self._renew(ends_s)
            return Timed(self.kernel, self.provider, shape, "bfloat16", direction, problem=problem)
        one = Timed(**{**told, "shape": tuple(told["shape"])})
        if "captur" in one.problem and self.is_in_graph:
            # Nothing more can be drawn at random in that process.
            self.is_in_graph = False
            self._renew(ends_s)
            return self.measure(direction, shape, copy_ns, ends_s)
        if "CUDA error" in one.problem:
            self._renew(ends_s)
        return one

    def _renew(self, ends_s):
        self.stop()
        if time.monotonic() < ends_s and self._num_ended <= MOST_STARTS:
            self.start(ends_s)


def timers_of(kernel):
    """Return a timer for each provider, ours first."""

    def place(provider):
        if provider.name == STANDARD.get(kernel.name):
            return 0.5
        if provider.name in LAST:
            return 2 + LAST.index(provider.name)
        return float(not provider.name.startswith(OURS))

    wanted = wanted_of(kernel)
    order = sorted(kernel.providers, key=place)
    return {one.name: Timer(kernel.name, one.name, wanted) for one in order}


def measure(name, timers, args, ends_s):
    """Measure all providers of one kernel, shape by shape; return whether ours misses some."""
    kernel = kernel_named(name)
    wanted = wanted_of(kernel)
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    path = args.out / f"{name}_h200_{month}.json"
    product = None
    if name == "linear_cross_entropy":
        product = (timers[OURS].ask({"product": True}, ends_s) or {}).get("product")
    done, rows, written_s = {}, [], time.monotonic()

    def measure_one(direction, shape, provider):
        copy_ns = agreed_copy(done, direction, shape)
        one = timers[provider].measure(direction, shape, copy_ns, ends_s)
        done[direction, shape, provider] = one
        print(line_of(one), flush=True)

    for direction, shape in wanted:
        for provider in timers:
            measure_one(direction, shape, provider)
        for key in odd_copies(done, direction, shape):
            before = done.pop(key)
            measure_one(*key)
            if done[key].gpu_ns is None:
                done[key] = before
        if (direction, shape) == wanted[-1] or time.monotonic() > written_s + WRITTEN_EVERY_S:
            rows = rows_of_all(kernel, wanted, done, product)
            versions = versions_of(kernel.providers)
            write_evidence(
                path, name, rows, sources_of(name), commit=args.commit, versions=versions
            )
            written_s = time.monotonic()
    print(table_of(rows), flush=True)
    return any(done[(*one, OURS)].gpu_ns is None for one in wanted)


def wanted_of(kernel):
    """Return direction and shape of all that is measured of a kernel."""
    if kernel.name == "linear_cross_entropy":
        return [("training", LOSS)]
    reaches = [one for one in REACHES if one.kernel == kernel.name]
    return [(one.direction, shape) for one in reaches for shape in one.shapes or kernel.shapes]


def agreed_copy(done, direction, shape):
    """Return how long a copy takes on which two processes agree; None where they do not yet."""
    copies = copies_of(done, direction, shape)
    if len(copies) < 2 or max(copies) > min(copies) * (1 + COPY_WITHIN):
        return None
    return statistics.median(copies)


def copies_of(done, direction, shape):
    """Return the times of all copies of the bytes of one shape."""
    here = (one for key, one in done.items() if key[:2] == (direction, shape))
    return [one.copy_ns for one in here if one.copy_ns]


def odd_copies(done, direction, shape):
    """Return whose copy took another time than the others' of the same bytes."""
    copies = copies_of(done, direction, shape)
    usual = statistics.median(copies) if copies else None
    return [
        key
        for key, one in done.items()
        if key[:2] == (direction, shape)
        and one.copy_ns
        and abs(one.copy_ns / usual - 1) > COPY_WITHIN
    ]


def work_off(name, provider, wanted):
    """Compile what is wanted of one provider, then measure what is asked for, a line each."""
    kernel = kernel_named(name)
    who = kernel.provider(provider)
    for direction, shape in wanted:
        # What it cannot do is told when it is measured.
        with suppress(Exception):
            run_once(kernel, who, tuple(shape), "bfloat16", direction)
    say({"ready": True})
    for asked in questions():
        if "product" in asked:
            say({"product": rate_of_product()})
            continue
        shape, direction = tuple(asked.pop("shape")), asked.pop("direction")
        (one,) = bench(kernel, shape, "bfloat16", direction, [who], **asked)
        say(dataclasses.asdict(one))


def sources_of(name):
    """Return the files that decide what is measured of a kernel: its own, and all they import."""
    found, left = set(), [f"kprof.kernels.{name}", "kprof.kernels._bench"]
    while left:
        path = Path(*left.pop().split(".")).with_suffix(".py")
        if path.as_posix() in found or not (ROOT / path).exists():
            continue
        found.add(path.as_posix())
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kprof.kernels"):
                left += [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
    return (*SOURCES, "kprof/kernels/__init__.py", *sorted(found))


def table_of(rows):
    """Return what was to be reached, a line each."""
    lines = []
    for one in rows:
        if one["reach"] is not None or one["peer"]:
            met = {True: "met", False: "NOT MET", None: "?" if one["reach"] else ""}[one["met"]]
            peer = f"best peer {one['peer']}" if one["peer"] else ""
            value = "not measured" if one["value"] is None else f"{one['value']:g} {one['unit']}"
            lines.append(f"{one['name']:44} {value:20} of {one['reach'] or '-':<8} {met:8} {peer}")
    return "\n".join(lines)


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
            # Who would run such calls.
            router=ranking(measured)[0].provider if ranking(measured) else None,
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
    num_rows, num_hidden, vocabulary = LOSS
    logits_bytes = 2 * num_rows * vocabulary
    gradients_bytes = 2 * num_hidden * (num_rows + vocabulary)
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
    if lean and lean.gpu_ns and product:
        rate = EXECUTED * lean.flops_per_s / product
        rows.append(row("lean-rate", rate, "of product", "higher", RATE_OF_PRODUCT))
        # The gradients themselves are what was asked for.
        memory = (lean.extra_bytes - gradients_bytes) / logits_bytes
        unit = "of logits, beside the gradients"
        rows.append(row("lean-memory", memory, unit, "lower", MEMORY_OF_LOGITS))
    return rows


def rate_of_product(size=8_192):
    """Return what a square product of random bf16 matrices reaches in this run, in FLOP/s."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    took = time_on_gpu(lambda: torch.mm(a, b, out=out), sample_ns=2e7)
    return 2 * size**3 / took.median_ns * 1e9


if __name__ == "__main__":
    main()
