"""Attention in FP8 beside bfloat16 and FlashAttention-3's FP8, on one GPU, in one run.

python benchmarks/attention_fp8.py [--seconds 60]

Calls, FLOPs and GPU times as in `attention.py`. `kprof` begins with bfloat16 and rounds it itself;
`kprof-attend` and `flash-attn-3` begin with what was rounded before. Errors are relative L2 ones of
normal data, against float32; `to-bf16` compares with the fastest provider of bfloat16.
"""

import argparse
import datetime
import time
from functools import partial
from pathlib import Path

import torch
from attention import COMPARED, Call, drawn, in_float32, loaded
from attention import SOURCES as OTHERS
from evidence import RESULTS, row, write_evidence

from kprof.kernels.attention._triton import Options, empty_results
from kprof.kernels.attention.attention_forward import KERNEL as WIDE
from kprof.kernels.attention.attention_fp8 import (
    STATED_ERROR,
    attend_quantized,
    attention_fp8,
    quantize_heads,
)
from kprof.kernels.bench.choice import versions_of
from kprof.kernels.fp8.quantize_fp8 import FP8, LARGEST
from kprof.timing import captured, time_on_gpu

SOURCES = ("benchmarks/attention_fp8.py", "kprof/kernels/attention/attention_fp8.py", *OTHERS)
CALLS = (
    *(
        Call(128, n, is_causal, 16, 16, 16_384 // n)
        for n in (8_192, 16_384)
        for is_causal in (True, False)
    ),
    *(Call(128, 2_048, True, 16, 16, 8), Call(64, 8_192, True, 32, 32, 2)),
    Call(128, 16_384, True, 32, 8, 1),
)
REACH = 1.5
LONG = 8_192
WIDE_PROVIDERS = ("kprof-hopper", "flash-attn-3", "sdpa-cudnn")


def main():
    """Measure all calls, as long as there is time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    args = parser.parse_args()
    ends_s = time.monotonic() + args.seconds
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    path = args.out / f"attention_fp8_h200_{month}.json"
    versions = versions_of(WIDE.providers)
    wide = {name: one for name, one in loaded().items() if name in WIDE_PROVIDERS}
    rows = []
    for call in CALLS:
        if time.monotonic() > ends_s:
            rows.append(row(call.name, None, "FLOP/s", "higher", problem="out of time"))
            continue
        rows += rows_of(call, measured(call, wide))
        write_evidence(path, "attention_fp8", rows, SOURCES, commit=args.commit, versions=versions)


def measured(call, wide):
    """Return GPU time, error and problem of everybody: of bfloat16, then of FP8."""
    q, k, v = given = drawn(call)
    expected = in_float32(call, *given)
    others = {
        f"bf16-{name}": one if isinstance(one, str) else partial(one, *given, call.is_causal)
        for name, one in wide.items()
    }
    others["kprof"] = lambda: attention_fp8(q, k, v, is_causal=call.is_causal)[0]
    others["kprof-attend"] = prepared(attending, call, given)
    others["flash-attn-3"] = prepared(flash_3, call, given)
    with torch.no_grad():
        return {name: one_of(function, expected) for name, function in others.items()}


def prepared(prepare, call, given):
    """Return what one prepares, or why it cannot."""
    try:
        return prepare(call, given)
    except (ImportError, RuntimeError) as problem:
        return f"{type(problem).__name__}: {str(problem)[:200]}"


def one_of(function, expected):
    """Return GPU time of a call in the replay of a graph, its error, and the problem with it."""
    try:
        if isinstance(function, str):
            raise ImportError(function)
        y = function()
        pairs = [(y[at][-COMPARED:].float(), exact) for at, exact in expected.items()]
        error = max(float((one - exact).norm() / exact.norm()) for one, exact in pairs)
        if not error < STATED_ERROR:
            raise ValueError(f"wrong: relative error {error:.2g}")
        calls = 2
        took = time_on_gpu(captured(function, calls), sample_ns=2e6, warm_up_s=0.1)
        return took.median_ns / calls, error, ""
    except ImportError as problem:
        return None, None, str(problem)
    except (RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError) as problem:
        return None, None, f"{type(problem).__name__}: {str(problem)[:200]}"


def attending(call, given):
    """Return our kernel alone."""
    made = quantize_heads(*given)
    options = Options(call.dim**-0.5, call.is_causal, 0, call.length)
    y, lse = empty_results(given[0])

    def attend():
        attend_quantized(made, y, lse, options)
        return y

    return attend


def flash_3(call, given):
    """Return FlashAttention-3's kernel alone."""
    from fa3_fwd_interface import flash_attn_func

    rounded, scales = [], {}
    for name, x in zip("qkv", given, strict=True):
        # Query heads that share keys share a scale there.
        shared = x.unflatten(1, (call.key_heads, -1)).float()
        largest = shared.abs().amax((2, 3, 4))
        values = (shared * (LARGEST / largest)[:, :, None, None, None]).flatten(1, 2)
        rounded.append(values.to(FP8).transpose(1, 2).contiguous())
        scales[f"{name}_descale"] = largest / LARGEST

    def attend():
        y = flash_attn_func(*rounded, causal=call.is_causal, **scales)
        return (y[0] if isinstance(y, tuple) else y).transpose(1, 2)

    return attend


def rows_of(call, found):
    """Return the rows of one call, and print a line."""
    rates = {name: ns and call.flops / ns * 1e9 for name, (ns, _, _) in found.items()}
    rows = []
    for name, (gpu_ns, error, problem) in found.items():
        about = {"gpu_ns": gpu_ns, "error": error, "problem": problem}
        rows.append(row(f"{call.name}-{name}", rates[name], "FLOP/s", "higher", **about))
    wide = max(
        (rate for name, rate in rates.items() if rate and name.startswith("bf16")), default=0
    )
    reach = REACH if call.dim == 128 and call.length >= LONG else None
    for name in ("kprof", "kprof-attend"):
        if rates[name] and wide:
            about = {} if name == "kprof" else {"beside": "what was rounded before"}
            ratio = rates[name] / wide
            rows.append(row(f"{call.name}-{name}-to-bf16", ratio, "x", "higher", reach, **about))
    if rates["kprof-attend"] and rates["flash-attn-3"]:
        ratio = rates["kprof-attend"] / rates["flash-attn-3"]
        rows.append(row(f"{call.name}-to-best", ratio, "x", "higher", 1.0, peer="flash-attn-3"))
    shown = ", ".join(
        f"{n} {r / 1e12:.0f} ({found[n][1]:.3f})" if r else f"{n} - ({found[n][2][:40]})"
        for n, r in rates.items()
    )
    print(f"{call.name:18} TFLOP/s (error): {shown}", flush=True)
    return rows


if __name__ == "__main__":
    main()
