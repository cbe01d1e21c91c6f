"""Comparisons on a GPU whose answer is known beforehand.

    python benchmarks/ab_known.py

Of two functions by `kprof.ab_test`, and of scripts in `workloads/known/` by `kprof ab`: changes
that are switched on and off in one process, and one of an argument, in alternating processes.
"""

import argparse
import datetime
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from evidence import RESULTS, ROOT, row, write_evidence
from torch.nn.attention import SDPBackend, sdpa_kernel

import kprof
from kprof.comparison import save

SOURCES = (
    *("benchmarks/ab_known.py", "benchmarks/workloads/known/*.py", "examples/fused_adamw.py"),
    *(
        "kprof/ab/compare.py",
        "kprof/ab/processes.py",
        "kprof/ab/in_process.py",
        "kprof/collect/trials.py",
    ),
    *("kprof/ab/functions.py", "kprof/ab/functions.py", "kprof/timing.py"),
    *("kprof/timing.py", "kprof/collect/nvml.py"),
    "kprof/analyze/verdict/*.py",
)
WORKLOADS = ROOT / "benchmarks" / "workloads" / "known"
# The installed program, as users have it, not this working tree.
KPROF = shutil.which("kprof") or str(Path(sys.executable).parent / "kprof")
CYCLES_PER_S = 1.98e9


def same():
    """Return the same product twice."""
    a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return (lambda: a @ b), (lambda: a @ b), "gpu"


def planted(share):
    """Return work of the GPU, and the same with a spin of this share of its time behind it."""
    x = torch.randn(2**29, device="cuda")

    def work():
        return x.sum()

    for _ in range(20):
        work()
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    for _ in range(200):
        work()
    torch.cuda.synchronize()
    cycles = int(share * (time.perf_counter() - began_s) / 200 * CYCLES_PER_S)

    def slower():
        result = work()
        torch.cuda._sleep(cycles)
        return result

    return work, slower, "gpu"


def attention():
    """Return attention by its formula, and by the flash kernel."""
    q, k, v = (torch.randn(4, 16, 2048, 128, device="cuda", dtype=torch.bfloat16) for _ in "qkv")

    def of(backend):
        def run():
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        return run

    return of(SDPBackend.MATH), of(SDPBackend.FLASH_ATTENTION), "gpu"


def optimizer():
    """Return the step of AdamW over 60 matrices, tensor by tensor, and fused."""

    def of(**options):
        parameters = [torch.nn.Parameter(torch.randn(1024, 1024, device="cuda")) for _ in range(60)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        adamw = torch.optim.AdamW(parameters, **options)

        def step():
            adamw.step()

        return step

    return of(foreach=False), of(fused=True), "wall"


def compiled():
    """Return a chain of elementwise operations, eager and compiled."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def chain(x):
        return torch.nn.functional.gelu(x * 1.5 + 0.25) * torch.sigmoid(x)

    fast = torch.compile(chain)
    return (lambda: chain(x)), (lambda: fast(x)), "wall"


KNOWN = {
    "same": (same, "SAME"),
    "planted-2-percent": (lambda: planted(0.02), "SLOWER"),
    "flash-for-math-attention": (attention, "FASTER"),
    "fused-for-single-adamw": (optimizer, "FASTER"),
    "compiled-for-eager": (compiled, "FASTER"),
}


def patched(script, change, *options):
    """Return the words of `kprof ab` for a change that is switched on and off in one process."""
    change = change if ".py:" in change else f"{WORKLOADS}/changes.py:{change}"
    return ["--patch", change, *options, str(WORKLOADS / script)]


COMMANDS = {
    "ab-planted-2-percent": (patched("products.py", "one_product_more"), "SLOWER"),
    "ab-flash-for-math-attention": (patched("train.py", "flash_attention"), "FASTER"),
    "ab-fused-for-single-adamw": (
        patched("train.py", f"{ROOT}/examples/fused_adamw.py:fused"),
        "FASTER",
    ),
    "ab-compiled-for-eager": (patched("train.py", "compiled"), "FASTER"),
    "ab-same": (patched("products.py", "nothing", "--window", "0.05"), "SAME"),
    "ab-same-training": (patched("train.py", "nothing", "--window", "0.1"), "SAME"),
    "ab-fused-by-argument": (["--arg", "--fused", str(WORKLOADS / "train.py")], "FASTER"),
}
TINY = {"products.py": ["--size", "64"], "train.py": ["--layers=1", "--width=64", "--tokens=64"]}


def main():
    """Run every comparison and write the result, anew after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--result", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for every comparison, with all its pairs")
    parser.add_argument("--only", nargs="*", default=[], help="take these, by name")
    parser.add_argument("--tiny", action="store_true", help="to try it on a CPU: commands alone")
    parser.add_argument("--minutes", type=float, default=10, help="begin nothing after these")
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    args = parser.parse_args()
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    path = args.result or RESULTS / f"ab_known_h200_{month}.json"
    keep = args.keep or Path(tempfile.mkdtemp())
    known = {} if args.tiny else KNOWN
    rows, began_s = [], time.monotonic()
    for name, (what, expected) in {**known, **COMMANDS}.items():
        is_asked = not args.only or name in args.only
        if not is_asked or time.monotonic() - began_s > args.minutes * 60:
            continue
        compare = by_command if name in COMMANDS else by_function
        rows.append(compare(name, what, expected, keep / name, is_tiny=args.tiny))
        write_evidence(path, "comparisons with a known answer", rows, SOURCES, commit=args.commit)


def by_function(name, make, expected, folder, *, is_tiny):
    """Compare two functions, and keep the comparison in `folder`."""
    a, b, clock = make()
    began_s = time.monotonic()
    found = kprof.ab_test(a, b, clock=clock)
    took_s = time.monotonic() - began_s
    folder.mkdir(parents=True, exist_ok=True)
    save(found, folder)
    told = json.loads((folder / "comparison.json").read_text())
    return judged(name, told, expected, took_s)


def by_command(name, words, expected, folder, *, is_tiny):
    """Run `kprof ab`, which keeps the comparison in `folder`; a failure is a row without value."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    more = TINY[Path(words[-1]).name] if is_tiny else []
    line = [KPROF, "ab", "--json", "--out", str(folder), "--force"]
    began_s = time.monotonic()
    done = subprocess.run([*line, *words, *more], capture_output=True, text=True)
    took_s = time.monotonic() - began_s
    shown = " ".join(["kprof ab", *words]).replace(f"{ROOT}/", "")
    if not done.stdout:
        problem = done.stderr.strip().splitlines()[-3:]
        print(f"{name:28} failed: {problem}")
        return row(name, None, "right", "higher", 1.0, line=shown, problem=problem)
    return judged(name, json.loads(done.stdout), expected, took_s, line=shown)


def judged(name, told, expected, took_s, **more):
    """Return the row of a comparison as it is saved, and print it."""
    claim = told["claims"][0]
    interval = claim["interval"] or {"ratio": None, "low": None, "high": None}
    ratio, span = interval["ratio"], [interval["low"], interval["high"]]
    print(
        f"{name:28} {claim['verdict']:12} {ratio} {span} {claim['num_pairs']} pairs {took_s:.1f} s"
    )
    print(f"    {claim['why']} {' '.join(told['doubts'])} {told['facts'].get('outputs', '')}")
    return row(
        name,
        float(claim["verdict"] == expected),
        "right",
        "higher",
        1.0,
        verdict=claim["verdict"],
        expected=expected,
        ratio_of_times=ratio,
        interval=span,
        why=claim["why"],
        num_pairs=claim["num_pairs"],
        took_s=took_s,
        doubts=told["doubts"],
        **more,
    )


if __name__ == "__main__":
    main()
