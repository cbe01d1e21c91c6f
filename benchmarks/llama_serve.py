"""A Llama of Hugging Face that serves, with kernels swapped in against as it is, by `kprof ab`.

python benchmarks/llama_serve.py [prefill | decode | decode_energy ...] [--minutes 4.1]

The shape is that of Llama-3.1-8B in bfloat16, with random weights, as in examples/serve_llama.py.
Prefill reads 4 x 2048 tokens. Decoding takes a token for each of 8 sequences over 4096 cached ones:
by replays of CUDA graphs over a static cache, and as `generate` calls the model by itself, over one
that grows. The joules of decoding by graphs are a part of their own, which nobody gets unasked: a
window has as many steps of either arm as take 2.5 s in the faster one, and the other takes four
times as long. The quality gate judges the kernels in a model of fewer such layers that has learnt:
benchmarks/llama_gate.py.
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
from itertools import pairwise
from pathlib import Path

from evidence import RESULTS, ROOT, row, write_evidence

EXAMPLE = ROOT / "examples" / "serve_llama.py"
GATE = ROOT / "benchmarks" / "llama_gate.py"
# Norms and SwiGLU are there as they cast for the layers in FP8 that read them.
OF_PREFILL = ("fp8_linear", "rmsnorm", "add_rmsnorm", "swiglu")
KERNELS = (*OF_PREFILL, "decode_attention")
SOURCES = (
    *("benchmarks/llama_serve.py", "benchmarks/llama_gate.py"),
    *("examples/serve_llama.py", "kprof/kernels/swap/swapping.py"),
    *(f"kprof/kernels/{name}.py" for name in KERNELS),
)
# At most, of a quarter of a second each, and of seconds: a clear difference is proven by nine.
PAIRS, PAIRS_OF_ENERGY = "20", "9"
# Seconds, from the interrupt of a comparison until it has judged what it has.
ENDING_S = 8
# What `timeout` ends with.
OUT_OF_TIME = 124
# Parts of the time; it is the last, and has what the others leave.
OF_GATE = 46


@dataclass(frozen=True)
class Asked:
    """One comparison: how B differs, what is served, and what both have to keep."""

    name: str
    change: tuple[str, ...]
    batch: int
    prompt: int
    target: str
    share: int
    """Parts of the time: about as many seconds, with all 32 layers on an H200."""
    options: tuple[str, ...] = ()
    is_energy: bool = False
    """Judge it as well; windows take seconds then."""


GRAPHS = ("graphs", ("--patch", f"{EXAMPLE}:kernels"), 8, 4_096, "step_p50<=5ms")
COMPARISONS = {
    "prefill": (
        Asked(
            *("prefill", ("--swap", ",".join(OF_PREFILL)), 4, 2_048, "step_p50<=200ms", 110),
            is_energy=True,
        ),
    ),
    "decode": (
        Asked(*GRAPHS, 46, ("--graphs",)),
        Asked("eager", ("--swap", ",".join(KERNELS)), 8, 4_096, "step_p50<=30ms", 48),
    ),
    "decode_energy": (Asked(*GRAPHS, 155, ("--graphs",), is_energy=True),),
}
# What is compared unless something else is asked for: it has texts for the gate.
JUDGED = ("prefill", "decode")


def main():
    """Compare what is asked for and write a result for each, anew after every part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", default=JUDGED, metavar="WHAT")
    parser.add_argument("--minutes", type=float, default=4.1, help="at most, of all together")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tiny", action="store_true", help="a small model, for a CPU")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    args = parser.parse_args()
    ends_s = time.monotonic() + 60 * args.minutes
    parts = [(what, one) for what in args.what for one in COMPARISONS[what]]
    is_judged = any(what in JUDGED for what in args.what)
    shares = [one.share for _, one in parts] + [OF_GATE] * is_judged
    found = {what: {} for what in args.what}
    for number, (what, one) in enumerate(parts):
        left_s = ends_s - time.monotonic()
        share_s = left_s * shares[number] / sum(shares[number:])
        found[what][one.name] = compared(one, what, args, share_s)
        write(what, found[what], args)
    if is_judged:
        for what, told in gated(args, ends_s - time.monotonic()).items():
            found[what] |= told
            write(what, found[what], args)


def compared(asked, what, args, limit_s):
    """Return what `kprof ab` says, as plain data; or why there is nothing."""
    script = [str(EXAMPLE), what.partition("_")[0], "--steps", "1000000"]
    script += ["--layers", str(args.layers), "--batch", str(asked.batch)]
    script += ["--prompt", str(40 if args.tiny else asked.prompt)]
    script += [*asked.options, *(["--tiny"] if args.tiny else [])]
    tokens = asked.batch * (asked.prompt if what == "prefill" else 1)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "kprof", "ab", "--json", *asked.change]
        command += ["--tokens-per-step", str(tokens), "--gpus", "1", "--target", asked.target]
        command += ["--pairs", PAIRS_OF_ENERGY if asked.is_energy else PAIRS]
        command += ["--energy"] if asked.is_energy and not args.tiny else []
        command += ["--out", f"{folder}/ab.kprof", *script]
        # As by Ctrl-C: what was taken until then is judged.
        limited = ["timeout", "-s", "INT", "-k", "10", f"{max(limit_s - ENDING_S, 1):.0f}"]
        asked_s, asked_ns = time.monotonic(), time.time_ns()
        done = subprocess.run([*limited, *command], capture_output=True, text=True)
        spent = {"spent_s": spent_s(Path(folder), asked_ns, time.monotonic() - asked_s)}
        with suppress(ValueError, KeyError):
            return kept(json.loads(done.stdout), Path(folder) / "ab.kprof") | spent
        told = [path.read_text()[-1_000:] for path in Path(folder).glob("ab.kprof/raw/**/*.log")]
    return {"problem": "\n".join([done.stderr[-1_500:], *told]), **spent}


def spent_s(folder, asked_ns, whole_s):
    """Return the seconds until the first step, those of each arm's first, of warm-up and windows.

    The first step of an arm makes what it keeps: weights in FP8, and what is compiled.
    """
    sheets = sorted(folder.glob("ab.kprof/raw/**/windows.jsonl"))
    told = sheets[0].read_text().splitlines() if sheets else []
    # The last line of a process that was ended may be a part of one.
    lines = [json.loads(line) for line in told if line.endswith("}")]
    found = {"whole": whole_s}
    for turn, block in pairwise(lines):
        if turn["kind"] == "turn" and "start_ns" in block:
            first_s = (block["start_ns"] - turn["time_ns"]) / 1e9
            found.setdefault(f"first step of {turn['arm']}", first_s)
    turns_ns = [one["time_ns"] for one in lines if one["kind"] == "turn"]
    windows = [one for one in lines if one["kind"] == "window"]
    if turns_ns:
        found["until the first step"] = (turns_ns[0] - asked_ns) / 1e9
    if windows:
        found["warm-up"] = (windows[0]["start_ns"] - turns_ns[0]) / 1e9
        found["windows"] = (windows[-1]["end_ns"] - windows[0]["start_ns"]) / 1e9
    return {name: round(value, 2) for name, value in found.items()}


def kept(told, folder):
    """Return what of a comparison is worth keeping: all but single steps and where things lie."""
    names = ("a", "plan", "claims", "protocol", "doubts", "per_token", "targets", "costs")
    found = {name: told.get(name) for name in names}
    found["pairs"] = [{"a": one["a"], "b": one["b"]} for one in told["pairs"]]
    found["facts"] = {name: fact for name, fact in told["facts"].items() if "/" not in fact}
    for of_arm in (found["targets"] or {}).values():
        for target in of_arm["targets"]:
            target.pop("by_run", None)
    swap = folder / "swap.json"
    if swap.exists():
        found["swap"] = summary_of_swap(json.loads(swap.read_text()))
    output = [path.read_text() for path in folder.glob("raw/**/output.log")]
    found["said"] = [
        line
        for one in output
        for line in one.splitlines()
        if "kernels" in line or "elsewhere" in line
    ][:5]
    return found


def summary_of_swap(report):
    """Return how many calls of how many sites went to kernels, and why others did not.

    Of layers in FP8 also how many calls found x in FP8 already.
    """
    sites = report["sites"]
    taken = [one for one in sites if any(not call["why"] for call in one["calls"])]
    why = sorted({call["why"] for one in sites for call in one["calls"] if call["why"]})
    skipped = sorted({one["skipped"] for one in sites if one["skipped"]})
    joined = sum(call.get("num_joined", 0) for one in sites for call in one["calls"])
    told = {"sites": len(sites), "replaced": len(taken), "joined": joined}
    return {**told, "fallen_back": why, "skipped": skipped}


def gated(args, limit_s):
    """Return what the gate says of each part and swap, from a process of its own."""
    asked = [what for what in args.what if what in JUDGED]
    command = [sys.executable, str(GATE), *asked, *(["--tiny"] if args.tiny else [])]
    limited = ["timeout", "-k", "5", f"{max(limit_s, 1):.0f}"]
    done = subprocess.run([*limited, *command], capture_output=True, text=True)
    told = {}
    with suppress(ValueError, IndexError):
        # Each line holds what those before it had.
        told = json.loads(done.stdout.splitlines()[-1])
    is_late = done.returncode == OUT_OF_TIME
    problem = {"gate": {"problem": "out of time" if is_late else done.stderr[-1_500:]}}
    return {what: told.get(what, problem) for what in asked}


def write(what, found, args):
    """Write what there is of one result, and print it."""
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    path = args.out / f"ab_llama8b_{what}_h200_{month}.json"
    rows = [one for name, told in found.items() for one in rows_of(name, told)]
    size = {"layers": args.layers, "of_layers": 32, "is_tiny": args.tiny}
    write_evidence(
        path, f"ab_llama8b_{what}", rows, SOURCES, commit=args.commit, size=size, **found
    )
    for one in rows:
        shown = {key: one[key] for key in ("interval", "verdict", "problem") if one.get(key)}
        print(f"{what} {one['name']:24} {one['value']} {one['unit']} {shown}", flush=True)


def rows_of(name, told):
    """Return the rows of one comparison, or of the gate."""
    if "problem" in told:
        return [row(name, None, "x tokens/s", "higher", problem=told["problem"])]
    if name == "learnt":
        return [row("training-loss", told["loss"], "nats", "lower")]
    if name.startswith("gate"):
        states = {level["name"]: level["state"] for level in told["levels"]}
        return [row(name, None, "class", "higher", verdict=told["reached"] or "none", **states)]
    return [*rows_of_claims(name, told), *rows_of_tokens(name, told), *rows_of_targets(name, told)]


def rows_of_claims(name, told):
    """Return the rows of the verdicts: B's value over A's."""
    rows = []
    for claim in told["claims"]:
        what, between = claim["metric"]["name"].replace(" ", "-"), claim["interval"]
        about = {"verdict": claim["verdict"], "num_pairs": claim["num_pairs"]}
        if between is not None:
            about["interval"] = [between["low"], between["high"]]
        value = between and between["ratio"]
        rows.append(row(f"{name}-{what}", value, "of A's", "lower", **about))
    return rows


def rows_of_tokens(name, told):
    """Return the rows of each arm's tokens: their rate, what they cost, and their energy."""
    rows = []
    for one in told["per_token"] or ():
        metric = one["claim"]["metric"]
        for arm in ("a", "b"):
            what = f"{name}-{metric['name'].replace(' ', '-')}-{arm}"
            rows.append(row(what, one[arm], metric["unit"], metric["better"]))
            if metric["unit"] == "tok/s" and "GPU" in told["facts"]:
                rows.append(row_of_cost(f"{name}-cost-{arm}", one[arm], told["facts"]["GPU"]))
    return rows


def rows_of_targets(name, told):
    """Return the rows of how each arm keeps its target."""
    return [
        row(
            f"{name}-target-{arm}",
            one["estimate"],
            "ns",
            "lower",
            target=one["target"],
            verdict=one["verdict"],
        )
        for arm, judged in (told["targets"] or {}).items()
        for one in judged["targets"]
    ]


def row_of_cost(name, tokens_per_s, gpu):
    """Return what a million tokens cost at this rate on that GPU, as `kprof cost` does."""
    from kprof.ab.pricing import calculate

    asked = {"tokens_per_s": repr(tokens_per_s), "utilisation": "1"}
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    costs = calculate(asked, today, ran_on=gpu)
    figure = next((one for one in costs.figures if one.name == "as paid"), None)
    if figure is None:
        return row(name, None, "$/M tokens", "lower", problem=f"no price of {gpu} is known")
    low, middle, high = (float(getattr(figure.values, one)) for one in ("low", "mid", "high"))
    return row(name, middle, "$/M tokens", "lower", price=costs.price.name, low=low, high=high)


if __name__ == "__main__":
    main()
