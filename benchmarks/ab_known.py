"""Comparisons on a GPU whose answer is known beforehand, by `kprof.ab_test`.

python benchmarks/ab_known.py
"""

import argparse
import datetime
import time
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from evidence import RESULTS, row, write_evidence
from torch.nn.attention import SDPBackend, sdpa_kernel

import kprof
from kprof.comparison import save

SOURCES = (
    *("benchmarks/ab_known.py", "kprof/callables.py", "kprof/outputs.py", "kprof/timing.py"),
    *("kprof/stopwatch.py", "kprof/collect/conditions.py"),
    "kprof/analyze/verdict/*.py",
)
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


def main():
    """Run every comparison and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--result", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for every comparison, with all its pairs")
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    args = parser.parse_args()
    rows = []
    for name, (make, expected) in KNOWN.items():
        a, b, clock = make()
        began_s = time.monotonic()
        found = kprof.ab_test(a, b, clock=clock)
        claim, took_s = found.headline, time.monotonic() - began_s
        if args.keep:
            (args.keep / name).mkdir(parents=True, exist_ok=True)
            save(found, args.keep / name)
        ratio = claim.interval.ratio if claim.interval else None
        span = [claim.interval.low, claim.interval.high] if claim.interval else None
        print(f"{name:26} {claim.verdict:12} {ratio} {span} {claim.num_pairs} pairs {took_s:.1f} s")
        print(f"    {claim.why} {' '.join(found.doubts)} {found.facts.get('outputs', '')}")
        is_right = float(claim.verdict == expected)
        rows.append(
            row(
                name,
                is_right,
                "right",
                "higher",
                1.0,
                verdict=claim.verdict,
                expected=expected,
                ratio_of_times=ratio,
                interval=span,
                why=claim.why,
                num_pairs=claim.num_pairs,
                took_s=took_s,
                doubts=list(found.doubts),
            )
        )
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    path = args.result or RESULTS / f"ab_known_h200_{month}.json"
    write_evidence(path, "comparisons with a known answer", rows, SOURCES, commit=args.commit)


if __name__ == "__main__":
    main()
