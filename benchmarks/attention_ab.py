"""A Llama that trains, or reads a long prompt, with fused attention against torch's, by `kprof ab`.

python benchmarks/attention_ab.py [training | prefill | fp8 ...] [--minutes 12] [--provider NAME]

The shape is that of Llama-3.1-8B in bfloat16 with random weights, the sequence of 16,384 tokens:
a prompt through all 32 layers, whose step is the time to the first token (examples/serve_llama.py),
in bfloat16 and in FP8; and a step of training 8 of them (workloads/llama_long.py). A is the model
as Hugging Face has it, whose attention is torch's default. The quality gate judges in a model that
has learnt: benchmarks/attention_gate.py.
"""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from evidence import RESULTS, ROOT, write_evidence
from llama_serve import kept, rows_of

SOURCES = (
    *("benchmarks/attention_ab.py", "benchmarks/attention_gate.py", "benchmarks/llama_gate.py"),
    *("benchmarks/workloads/llama_long.py", "examples/serve_llama.py"),
    *("kprof/kernels/attention/attention_forward.py", "kprof/kernels/attention/attention_fp8.py"),
)
GATE = ROOT / "benchmarks" / "attention_gate.py"
TOKENS, TINY_TOKENS = 16_384, 40
# Nine prove a clear difference; five of training took 115 seconds on an H100, the start included.
PAIRS = "10"
# Seconds, from the interrupt of a comparison until it has judged what it has.
ENDING_S = 8
# What `timeout` ends with, and what it ends in the end.
OUT_OF_TIME = (124, 137)
# Parts of the time, where a comparison is one.
OF_GATE = 0.9
# Runs wherever torch does.
ANYWHERE = "eager"


@dataclass(frozen=True)
class Asked:
    """One comparison: what runs, whose attention B has, and what both have to keep."""

    script: tuple[str, ...]
    provider: str
    """Asked for by name: unasked, attention is replaced only where somebody measured it."""
    layers: int
    target: str
    kernel: str = "attention_forward"


COMPARISONS = {
    "training": Asked(
        (str(ROOT / "benchmarks" / "workloads" / "llama_long.py"), "--tokens"),
        *("kprof-hopper-unordered", 8, "step_p50<=500ms"),
    ),
    "prefill": Asked(
        (str(ROOT / "examples" / "serve_llama.py"), "prefill", "--batch", "1", "--prompt"),
        *("kprof-hopper", 32, "step_p50<=500ms"),
    ),
    "fp8": Asked(
        (str(ROOT / "examples" / "serve_llama.py"), "prefill", "--batch", "1", "--prompt"),
        *("kprof", 32, "step_p50<=500ms", "attention_fp8"),
    ),
}


def main():
    """Compare what is asked for and write a result for each, anew after every part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", default=[*COMPARISONS])
    parser.add_argument("--minutes", type=float, default=12.0, help="at most, of all together")
    parser.add_argument("--provider", default=None, help="whose attention, of that in 16 bits")
    parser.add_argument("--tiny", action="store_true", help="a small model, for a CPU")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    args = parser.parse_args()
    ends_s = time.monotonic() + 60 * args.minutes
    found = {what: {} for what in args.what}
    for number, what in enumerate(args.what):
        left_s = ends_s - time.monotonic()
        share_s = left_s / (len(args.what) - number + OF_GATE)
        found[what][what] = compared(what, args, share_s)
        write(what, found[what], args)
    for what, told in gated(args, ends_s - time.monotonic()).items():
        found[what] |= told
        write(what, found[what], args)


def provider_of(what, args):
    """Return whose attention one comparison is of."""
    asked = COMPARISONS[what]
    named = args.provider if asked.kernel == Asked.kernel else None
    return named or (ANYWHERE if args.tiny else asked.provider)


def compared(what, args, limit_s):
    """Return what `kprof ab` says, as plain data; or why there is nothing."""
    asked, tokens = COMPARISONS[what], str(TINY_TOKENS if args.tiny else TOKENS)
    script = [*asked.script, tokens, "--steps", "1000000"]
    script += ["--tiny"] if args.tiny else ["--layers", str(asked.layers)]
    swap = f"{asked.kernel}={provider_of(what, args)}"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "kprof", "ab", "--json", "--swap", swap]
        command += ["--tokens-per-step", tokens, "--gpus", "1", "--target", asked.target]
        command += ["--pairs", PAIRS, *([] if args.tiny else ["--energy"])]
        command += ["--out", f"{folder}/ab.kprof", *script]
        # As by Ctrl-C: what was taken until then is judged.
        limited = ["timeout", "-s", "INT", "-k", "10", f"{max(limit_s - ENDING_S, 1):.0f}"]
        began_s = time.monotonic()
        done = subprocess.run([*limited, *command], capture_output=True, text=True)
        about = {"swapped": swap, "took_s": round(time.monotonic() - began_s, 1)}
        with suppress(ValueError, KeyError):
            return kept(json.loads(done.stdout), Path(folder) / "ab.kprof") | about
        told = [path.read_text()[-1_000:] for path in Path(folder).glob("ab.kprof/raw/**/*.log")]
    return {"problem": "\n".join([done.stderr[-1_500:], *told]), **about}


def gated(args, limit_s):
    """Return what the gate says of each part, from a process of its own."""
    asked = [f"{what}={provider_of(what, args)}" for what in args.what]
    command = [sys.executable, str(GATE), *asked, *(["--tiny"] if args.tiny else [])]
    limited = ["timeout", "-k", "5", f"{max(limit_s, 1):.0f}"]
    done = subprocess.run([*limited, *command], capture_output=True, text=True)
    with suppress(ValueError, IndexError):
        return json.loads(done.stdout.splitlines()[-1])
    problem = "out of time" if done.returncode in OUT_OF_TIME else done.stderr[-1_500:]
    return {what: {"gate": {"problem": problem}} for what in args.what}


def write(what, found, args):
    """Write what there is of one result, and print it."""
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    path = args.out / f"ab_attention_{what}_h200_{month}.json"
    rows = [one for name, told in found.items() for one in rows_of(name, told)]
    layers = COMPARISONS[what].layers
    size = {"layers": layers, "of_layers": 32, "tokens": TOKENS, "is_tiny": args.tiny}
    about = {"commit": args.commit, "size": size}
    write_evidence(path, f"ab_attention_{what}", rows, SOURCES, **about, **found)
    for one in rows:
        shown = {key: one[key] for key in ("interval", "verdict", "problem") if one.get(key)}
        print(f"{what} {one['name']:28} {one['value']} {one['unit']} {shown}", flush=True)


if __name__ == "__main__":
    main()
