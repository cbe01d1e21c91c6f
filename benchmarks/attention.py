"""Attention of many queries beside torch's own and the installed peers', on one GPU, in one run.

python benchmarks/attention.py [--seconds 100] [--dims 128 64 256]

GPU time is that of a CUDA graph's replay. A call has 16,384 tokens, all its heads together 2,048
columns; a FLOP is counted where a query sees a key. Every provider's result is compared with one
in float32. Peers that are not installed are missing, and so is what they do not do; `problem` says
why.
"""

import argparse
import datetime
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from evidence import RESULTS, row, write_evidence

from kprof.kernels import OURS
from kprof.kernels.attention.attention_forward import KERNEL
from kprof.kernels.bench.choice import versions_of
from kprof.timing import captured, time_on_gpu

SOURCES = (
    "benchmarks/attention.py",
    *("kprof/kernels/attention/attention_forward.py", "kprof/timing.py", "kprof/timing.py"),
)
TOKENS, COLUMNS = 16_384, 2_048
LENGTHS = (8_192, 2_048, 1_024, 4_096, 16_384, 512)
# Relative L2 error: what is not right is not measured.
MOST_ERROR = 0.02
SHORTEST_SAMPLE_NS = 2e6
# Of the queries, compared from the end of the first head on, where a row sees most.
COMPARED = 256
UNMEASURED = ("eager", "sdpa-math")


@dataclass(frozen=True)
class Call:
    """One call: columns and heads, tokens of each sequence, and whether it is causal."""

    dim: int
    length: int
    is_causal: bool
    heads: int
    key_heads: int
    batch: int

    @property
    def name(self):
        """Return what rows are called by."""
        how = "causal" if self.is_causal else "full"
        group = "" if self.heads == self.key_heads else f"-gqa{self.heads}/{self.key_heads}"
        return f"{how}-{self.dim}-{self.length}{group}"

    @property
    def flops(self):
        """Return those of the keys that queries see."""
        pairs = self.length * (self.length + 1) // 2 if self.is_causal else self.length**2
        return 4 * self.batch * self.heads * self.dim * pairs


def calls_of(dims):
    """Return the calls, the most telling first."""
    found = [
        Call(dim, n, is_causal, COLUMNS // dim, COLUMNS // dim, TOKENS // n)
        for n in LENGTHS
        for dim in dims
        for is_causal in (True, False)
    ]
    return [*found, Call(128, 8_192, True, 32, 8, 1), Call(128, 16_384, True, 32, 8, 1)]


def main():
    """Measure all calls, as long as there is time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--dims", type=int, nargs="+", default=[128, 64, 256])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    args = parser.parse_args()
    ends_s = time.monotonic() + args.seconds
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    path = args.out / f"attention_fwd_h200_{month}.json"
    versions = versions_of(KERNEL.providers)
    functions = loaded()
    rows = []
    for call in calls_of(args.dims):
        if time.monotonic() > ends_s:
            rows.append(row(call.name, None, "FLOP/s", "higher", problem="out of time"))
            continue
        rows += rows_of(call, measured(call, functions))
        write_evidence(path, "attention_fwd", rows, SOURCES, commit=args.commit, versions=versions)


def loaded():
    """Return every provider's function, or why there is none."""
    found = {}
    for provider in KERNEL.providers:
        if provider.name in UNMEASURED:
            continue
        try:
            found[provider.name] = provider.load()
        except ImportError as error:
            found[provider.name] = f"not installed: {error}"
    return found


def drawn(call):
    """Return queries, keys and values."""
    shapes = [(call.batch, heads, call.length, call.dim) for heads in (call.heads, call.key_heads)]
    q_shape, k_shape = shapes
    made = (torch.randn(shape, device="cuda") for shape in (q_shape, k_shape, k_shape))
    return [one.bfloat16() for one in made]


def measured(call, functions):
    """Return GPU time or problem of every provider."""
    given = drawn(call)
    expected = in_float32(call, *given)
    found = {}
    for name, function in functions.items():
        try:
            if isinstance(function, str):
                raise ImportError(function)
            found[name] = gpu_ns_of(function, given, call, expected), ""
        except ImportError as error:
            found[name] = None, str(error)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError) as error:
            found[name] = None, f"{type(error).__name__}: {str(error)[:200]}"
        torch.cuda.empty_cache()
    return found


def gpu_ns_of(function, given, call, expected):
    """Return the time of a call in the replay of a graph; what is not right has none."""
    with torch.no_grad():
        y = function(*given, call.is_causal, 0)
        for batch, head in ((0, 0), (-1, -1)):
            error = y[batch, head, -COMPARED:].float() - expected[batch, head]
            error = float(error.norm() / expected[batch, head].norm())
            if not error < MOST_ERROR:
                raise ValueError(f"wrong: relative error {error:.2g}")
        calls = 2
        work = captured(lambda: function(*given, call.is_causal, 0), calls)
        took = time_on_gpu(work, sample_ns=SHORTEST_SAMPLE_NS, warm_up_s=0.1)
    return took.median_ns / calls


def in_float32(call, q, k, v):
    """Return the attention of the last queries of the first and the last head."""
    found = {}
    for batch, head in ((0, 0), (-1, -1)):
        last = q[batch, head, -COMPARED:].float()
        scores = last @ k[batch, head].float().T * call.dim**-0.5
        if call.is_causal:
            own = torch.arange(call.length, device="cuda")[-len(last) :, None]
            later = torch.arange(call.length, device="cuda") > own
            scores = scores.masked_fill(later, -torch.inf)
        found[batch, head] = torch.softmax(scores, -1) @ v[batch, head].float()
    return found


def rows_of(call, found):
    """Return the rows of one call, and print a line."""
    rates = {name: ns and call.flops / ns * 1e9 for name, (ns, _) in found.items()}
    rows = []
    for name, (gpu_ns, problem) in found.items():
        what = call.name if name == f"{OURS}-hopper" else f"{call.name}-{name}"
        about = {"gpu_ns": gpu_ns, "problem": problem}
        rows.append(row(what, rates[name], "FLOP/s", "higher", **about))
    ours = max((rate for name, rate in rates.items() if rate and name.startswith(OURS)), default=0)
    peers = {n: rate for n, rate in rates.items() if rate and not n.startswith(OURS)}
    if ours and peers:
        best = max(peers, key=peers.get)
        ratio = ours / peers[best]
        rows.append(row(f"{call.name}-to-best", ratio, "x", "higher", 1.0, peer=best))
    shown = ", ".join(
        f"{n} {r / 1e12:.0f}" if r else f"{n} - ({found[n][1][:40]})" for n, r in rates.items()
    )
    print(f"{call.name:18} TFLOP/s: {shown}", flush=True)
    return rows


if __name__ == "__main__":
    main()
