"""Gradients of attention beside torch's own and the installed peers', on one GPU, in one run.

python benchmarks/attention_backward.py [--seconds 200] [--dims 128 64 256]

Calls as in `attention.py`, plainly causal or full. GPU time is that of a CUDA graph's replay, of a
backward pass alone and of both passes as one; FLOPs are five products for each two of the forward
pass, none for scores that are computed again. Gradients of one head of keys are compared with those
in float32. Peers that are not installed are missing; `problem` says why one has no rate.
"""

import argparse
import datetime
import time
from pathlib import Path

import torch
from attention import calls_of, drawn, loaded
from evidence import RESULTS, row, write_evidence

from kprof.kernels import OURS
from kprof.kernels.attention.attention_forward import KERNEL
from kprof.kernels.bench.choice import versions_of
from kprof.kernels.bench.measure import pass_of
from kprof.timing import captured, time_on_gpu

SOURCES = (
    *("benchmarks/attention.py", "benchmarks/attention_backward.py"),
    *("kprof/kernels/attention/attention_forward.py", "kprof/timing.py", "kprof/timing.py"),
)
# Relative L2 error of a gradient: what is not right is not measured.
MOST_ERROR = 0.03
SHORTEST_SAMPLE_NS = 2e6
PASSES = ("backward", "training")


def main():
    """Measure all calls, as long as there is time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--dims", type=int, nargs="+", default=[128, 64, 256])
    parser.add_argument("--longest", type=int, default=16_384, help="tokens of a sequence")
    parser.add_argument("--without", nargs="+", default=[], help="providers to leave out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    args = parser.parse_args()
    ends_s = time.monotonic() + args.seconds
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    path = args.out / f"attention_bwd_h200_{month}.json"
    versions = versions_of(KERNEL.providers)
    functions = {name: one for name, one in loaded().items() if name not in args.without}
    rows = []
    for call in calls_of(args.dims):
        if call.length > args.longest:
            continue
        if time.monotonic() > ends_s:
            rows.append(row(call.name, None, "FLOP/s", "higher", problem="out of time"))
            continue
        rows += rows_of(call, measured(call, functions))
        write_evidence(path, "attention_bwd", rows, SOURCES, commit=args.commit, versions=versions)


def measured(call, functions):
    """Return GPU times of both passes, or a problem, of every provider."""
    given = drawn(call)
    expected = in_float32(call, *given)
    found = {}
    for name, function in functions.items():
        try:
            if isinstance(function, str):
                raise ImportError(function)
            check(function, given, call, expected)
            found[name] = [gpu_ns_of(function, given, call, one) for one in PASSES], ""
        except ImportError as error:
            found[name] = None, str(error)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError) as error:
            found[name] = None, f"{type(error).__name__}: {str(error)[:200]}"
        torch.cuda.empty_cache()
    return found


def gradients_of_sum(y, dy, given):
    """Return the gradients of a result for these of its own."""
    return torch.autograd.grad(y, given, dy)


def arriving(call):
    """Return gradients of results, the same for all."""
    torch.manual_seed(9)
    shape = (call.batch, call.heads, call.length, call.dim)
    return torch.randn(shape, device="cuda").bfloat16()


def check(function, given, call, expected):
    """Raise where the gradients of the last head of keys are not right."""
    given = [one.detach().requires_grad_() for one in given]
    y = function(*given, call.is_causal, 0)
    if not y.requires_grad:
        raise NotImplementedError("no gradients")
    found = gradients_of_sum(y, arriving(call), given)
    for what, gradient, wanted in zip("qkv", found, expected, strict=True):
        ours = gradient[-1, -len(wanted) :].float()
        error = float((ours - wanted).norm() / wanted.norm())
        if not error < MOST_ERROR:
            raise ValueError(f"wrong: relative error {error:.2g} of the gradient of {what}")


def in_float32(call, q, k, v):
    """Return the gradients of the last head of keys, and of the query heads that share it."""
    group = call.heads // call.key_heads
    parts = (q[-1, -group:], k[-1, -1:], v[-1, -1:])
    parts = [one.float().detach().requires_grad_() for one in parts]
    dy = arriving(call)[-1, -group:].float()
    found = [torch.empty_like(parts[0]), *(torch.zeros_like(one) for one in parts[1:])]
    for head in range(group):
        scores = parts[0][head] @ parts[1][0].T * call.dim**-0.5
        if call.is_causal:
            scores = scores.masked_fill(
                torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf
            )
        y = torch.softmax(scores, -1) @ parts[2][0]
        dq, dk, dv = gradients_of_sum(y, dy[head], parts)
        found[0][head] = dq[head]
        found[1] += dk
        found[2] += dv
        del scores, y
    return found


def gpu_ns_of(function, given, call, direction):
    """Return the time of one pass in the replay of a graph."""
    sets = [tuple(one.detach().clone() for one in given) for _ in range(2)]
    sets = [(*one, call.is_causal, 0) for one in sets]
    work = captured(pass_of(KERNEL, function, sets, direction), len(sets))
    took = time_on_gpu(work, num_samples=8, sample_ns=SHORTEST_SAMPLE_NS, warm_up_s=0.1)
    return took.median_ns / len(sets)


def rows_of(call, found):
    """Return the rows of one call, and print a line."""
    rows, shown = [], []
    flops = {"backward": call.flops * 5 / 2, "training": call.flops * 7 / 2}
    for place, direction in enumerate(PASSES):
        times = {name: ns[place] for name, (ns, _) in found.items() if ns}
        rates = {name: flops[direction] / ns * 1e9 for name, ns in times.items()}
        for name, (_, problem) in found.items():
            about = {"gpu_ns": times.get(name), "problem": problem}
            what = f"{call.name}-{direction}-{name}"
            rows.append(row(what, rates.get(name), "FLOP/s", "higher", **about))
        ours = max((rate for name, rate in rates.items() if name.startswith(OURS)), default=0)
        peers = {n: rate for n, rate in rates.items() if not n.startswith(OURS)}
        if ours and peers:
            best = max(peers, key=peers.get)
            what = f"{call.name}-{direction}-to-best"
            rows.append(row(what, ours / peers[best], "x", "higher", 1.0, peer=best))
        shown.append(", ".join(f"{n} {rate / 1e12:.0f}" for n, rate in rates.items()))
    print(f"{call.name:18} TFLOP/s backward: {shown[0]}; with forward: {shown[1]}", flush=True)
    for name, (_, problem) in found.items():
        if problem and "not installed" not in problem:
            print(f"    {name}: {problem[:160]}", flush=True)
    return rows


if __name__ == "__main__":
    main()
