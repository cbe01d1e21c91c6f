"""FP8 products and linear layers beside torch's own and the installed peers', on one GPU.

python benchmarks/fp8.py [fp8_linear | fp8_gemm ...] [--minutes 6]
python benchmarks/fp8.py fp8_linear --again RESULT --gates GATES.json ...

Each provider is measured in processes of its own, which compile beside each other, then measure one
after the other, shape by shape: by replays of a CUDA graph over weights that L2 cannot hold. What
counts for the linear layer: that it is never slower than whoever is fastest, how much faster it is
than the better of DeepGEMM, cast included, and torchao compiled, and than bf16; of our provider
alone, and of the one that kprof would choose. The product alone is measured with scales for rows
and, where a shape has a fourth number, in squares of 128. `--gates` are what `kprof kernels check
KERNEL --provider NAME --forward --dtype bfloat16 --json` told; `--again` sums an earlier result up
anew, on any machine.
"""

import argparse
import dataclasses
import datetime
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from evidence import RESULTS, row, what_ran, write_evidence
from fp8_reaches import gates_of, rows_of_reach
from workers import Worker, questions, say

from kprof.kernels import OURS, kernel_named
from kprof.kernels.bench.choice import versions_of
from kprof.kernels.bench.measure import Timed, bench, run_once

SOURCES = (
    *("benchmarks/fp8.py", "benchmarks/workers.py"),
    *("kprof/kernels/fp8/fp8_gemm.py", "kprof/kernels/fp8/fp8_linear.py"),
    *("kprof/timing.py", "kprof/timing.py"),
)
# Those that sum up: they may change behind a measurement.
SUMS = ("benchmarks/fp8_reaches.py",)
KERNELS = ("fp8_linear", "fp8_gemm")
# What a call takes the host is measured on this, which every provider takes.
SMALL = (16, 256, 512)
BLOCKED = 1
# Processes of a provider that compiles for every shape, so that nobody waits for it.
PARTS = {"torchao": 7, "deep-gemm": 5, OURS: 3}
# No share of a copy's rate is asked for, so that no copy need be measured.
NO_COPY = 1.0
CANNOT = (ImportError, RuntimeError, TypeError, ValueError, NotImplementedError)


def main():
    """Measure the kernels named, or both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", nargs="*", default=KERNELS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--minutes", type=float, default=6.0, help="of all kernels together")
    parser.add_argument("--at-once", type=int, default=16, help="processes that compile")
    parser.add_argument("--gates", nargs="*", type=Path, default=[], help="reports of the gate")
    parser.add_argument("--again", type=Path, help="a result to sum up anew: nothing is measured")
    parser.add_argument("--shapes", nargs="*", help="such as 8x4096x4096; left out, all")
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    parser.add_argument("--work", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work_off(**json.loads(args.work))
        return
    if args.again:
        sum_up(args.again, args.gates)
        return
    ends_s = time.monotonic() + 60 * args.minutes
    for number, name in enumerate(args.kernels):
        share_s = (ends_s - time.monotonic()) / (len(args.kernels) - number)
        measure(name, args, time.monotonic() + share_s)


def sum_up(path, gates):
    """Put a result's summary anew behind what was measured, and with its sources who summed up."""
    result = json.loads(path.read_text())
    name = result["what"]
    rows = [one for one in result["rows"] if one["unit"] == "ns"]
    summary = rows_of_reach(name, rows, gates_of(name, gates))
    result |= {"rows": rows + summary, "ran": {**result["ran"], **what_ran(SUMS)}}
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print_reaches(name, summary)


def print_reaches(name, rows):
    """Print how far it is to what is to be reached, or why nothing can be."""
    for one in rows:
        if one["unit"] != "ns":
            unjudged = ", ".join(one.get("not_judged", ()))
            told = f"no gate of {unjudged}" if unjudged else f"to reach {one['reach']}"
            print(f"{name} {one['name']}: {one['value']} {one['unit']}, {told}")


def shapes_of(name, wanted=None):
    """Return the shapes that are measured, fewest rows first; of products, both sorts of scales."""
    shapes = sorted(kernel_named(name).shapes)
    if wanted:
        shapes = [tuple(map(int, one.split("x"))) for one in wanted]
    return shapes + ([(*one, BLOCKED) for one in shapes] if name == "fp8_gemm" else [])


def measure(name, args, ends_s):
    """Measure all providers of one kernel, shape by shape, and write its result."""
    kernel, shapes = kernel_named(name), shapes_of(name, args.shapes)
    workers = started(kernel, shapes, args.at_once, ends_s)
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    path, versions = args.out / f"{name}_h200_{month}.json", versions_of(kernel.providers)
    done, written_s, gates = {}, time.monotonic(), gates_of(name, args.gates)

    def write():
        rows = rows_of(name, done, gates)
        sources = SOURCES + SUMS
        write_evidence(path, name, rows, sources, commit=args.commit, versions=versions)
        return rows

    for shape in shapes:
        for provider in kernel.providers:
            told = workers[shape, provider.name].ask(shape, ends_s)
            done[shape, provider.name] = timed_of(told, name, provider.name, shape)
        print(line_of(shape, done, kernel.providers), flush=True)
        if time.monotonic() - written_s > 10:
            write()
            written_s = time.monotonic()
    print_reaches(name, write())
    for worker in set(workers.values()):
        worker.stop()


def started(kernel, shapes, at_once, ends_s):
    """Return for each shape and provider the process that measures it, compiled and waiting."""
    workers = {}
    # Those that compile longest begin first.
    for provider in sorted(kernel.providers, key=lambda one: -PARTS.get(one.name, 1)):
        parts = PARTS.get(provider.name, 1)
        for part in range(parts):
            of_part = shapes[part::parts]
            work = {"name": kernel.name, "provider": provider.name, "shapes": of_part}
            # One process each compiles: together they fill the host.
            worker = Worker(work, TORCHINDUCTOR_COMPILE_THREADS="1")
            workers |= {(shape, provider.name): worker for shape in of_part}
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda one: one.start(ends_s), dict.fromkeys(workers.values())))
    return workers


def timed_of(told, name, provider, shape):
    """Return what a process told; one that told nothing ran out of time, or ended."""
    if told is None:
        about = (name, provider, shape, "bfloat16", "forward")
        return Timed(*about, problem="out of time, or the process ended early")
    return Timed(**{**told, "shape": tuple(told["shape"])})


def work_off(name, provider, shapes):
    """Compile one provider for some shapes; then measure it on those that are asked for."""
    kernel = kernel_named(name)
    chosen = kernel.provider(provider)
    for shape in shapes:
        # What it cannot do is told when it is asked.
        with suppress(*CANNOT):
            run_once(with_edge(kernel, shape), chosen, tuple(shape), "bfloat16", "forward")
    say({"ready": True})
    for asked in questions():
        about = (with_edge(kernel, asked), tuple(asked), "bfloat16", "forward", [chosen])
        say(dataclasses.asdict(next(bench(*about, copy_ns=NO_COPY))))


def with_edge(kernel, shape):
    """Return the kernel with a small shape of the same sort, on which the host is timed."""
    return dataclasses.replace(kernel, edges=((*SMALL, *shape[3:]),))


def line_of(shape, done, providers):
    """Return what is known of one shape in a line: microseconds, or a dash."""
    times = {one.name: done[shape, one.name].gpu_ns for one in providers}
    shown = (f"{name} {ns / 1e3:.2f}" if ns else f"{name} -" for name, ns in times.items())
    return f"{'x'.join(map(str, shape)):18} us: {', '.join(shown)}"


def rows_of(name, done, gates):
    """Return a row for each measurement, then what they come to together."""
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
            problem=one.problem[:300],
        )
        for (shape, provider), one in done.items()
    ]
    return rows + rows_of_reach(name, rows, gates)


if __name__ == "__main__":
    main()
