"""A training step of a Llama of Hugging Face: as it is, with kernels swapped in, with Liger.

python benchmarks/llama_train.py [--minutes 3]

The shape is that of Llama-3.2-1B in bfloat16, the batch 4 x 1024 tokens, and the weights are
random, as in examples/train_llama.py. Each arm trains in a process of its own; the processes take
turns in random order, some steps each, while the others wait with their weights and moments alone:
all of it fits 80 GB. Then `kprof ab --swap` compares that example with itself.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from evidence import RESULTS, ROOT, row, write_evidence
from llama_arms import LIGERS, PLAIN, SWAPS, work_off
from workers import Worker

from kprof.analyze.verdict.judge import judge
from kprof.comparison import Metric, Pair, Plan

SOURCES = (
    *("benchmarks/llama_train.py", "benchmarks/llama_arms.py", "benchmarks/workers.py"),
    *("examples/train_llama.py", "kprof/kernels/swap/swapping.py"),
    *(f"kprof/kernels/{one.partition('=')[0]}.py" for arm in SWAPS.values() for one in arm),
)
# The best that changes nothing but modules, for `kprof ab`.
SHOWN = "swap-adamw"
FASTER, READY_S = 1.20, 10.0
FEWEST_ROUNDS = 6
STEPS = 5
STEP = Metric("step time", "ns")


def main():
    """Measure all arms in turns and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=3.0, help="at most, `kprof ab` included")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--arms", nargs="*", default=[PLAIN, *SWAPS, *LIGERS])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--result", type=Path)
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    parser.add_argument("--work", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work_off(**json.loads(args.work))
        return
    ends_s = time.monotonic() + 60 * args.minutes
    size = {name: getattr(args, name) for name in ("layers", "width", "tokens", "vocabulary")}
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    path = args.result or RESULTS / f"llama_train_h200_{month}.json"

    def write(arms, compared):
        rows = rows_of(arms, 4 * args.tokens) + rows_of_comparison(compared)
        told = {name: {**one.told, "rounds": one.rounds} for name, one in arms.items()}
        more = {"versions": versions(), "size": size, "arms": told, "comparison": compared}
        write_evidence(path, "llama_train", rows, SOURCES, commit=args.commit, **more)
        return rows

    # A third of the time is for `kprof ab`.
    arms = train(args.arms, size, args.rounds, ends_s - 60 * args.minutes / 3)
    write(arms, None)
    rows = write(arms, compare(size, ends_s))
    print(table_of(rows))


@dataclasses.dataclass
class Arm:
    """What a process said of itself, and of each round."""

    told: dict
    rounds: list


def train(names, size, num_rounds, ends_s):
    """Let all arms take turns until the time is up; return what each said."""
    workers, arms = {}, {}
    started = {}
    for name in names:
        # Nothing of ours was ever compiled there.
        cold = tempfile.mkdtemp(prefix="cold-")
        started[name] = Worker({"name": name, "size": size}, TRITON_CACHE_DIR=cold)
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(lambda one: one.start(ends_s), started.values()))
    for name, worker in started.items():
        # One at a time: the first steps of all together would not fit the GPU.
        told = worker.ask({"begin": True}, ends_s) or {"problem": "the process ended early"}
        arms[name] = Arm(told, [])
        print(f"{name:14} {json.dumps(told)[:600]}", flush=True)
        if told.get("problem"):
            worker.stop()
        else:
            workers[name] = worker
    order = random.Random(0)
    for number in range(num_rounds):
        heard = take_turns(workers, order, ends_s)
        # What is not whole would pair neighbours that are none.
        if len(heard) < len(workers):
            break
        for name, found in heard.items():
            arms[name].rounds.append(found)
        shown = "  ".join(f"{n} {one['step_ns'] / 1e6:.1f}" for n, one in sorted(heard.items()))
        print(f"round {number + 1}, ms a step: {shown}", flush=True)
    for worker in workers.values():
        worker.stop()
    return arms


def take_turns(workers, order, ends_s):
    """Let every arm take its steps, in random order; return what each said until one did not."""
    turn, heard = list(workers), {}
    order.shuffle(turn)
    for place, name in enumerate(turn):
        found = workers[name].ask({"steps": STEPS}, ends_s)
        if found is None:
            break
        heard[name] = {**found, "place": place}
    return heard


def compare(size, ends_s):
    """Return what `kprof ab --swap` says of the example, as plain data; None without a verdict."""
    script = [str(ROOT / "examples" / "train_llama.py"), "--steps", "100000"]
    script += [word for name, value in size.items() for word in (f"--{name}", str(value))]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "kprof", "ab", "--json", "--swap", ",".join(SWAPS[SHOWN])]
        command += ["--out", f"{folder}/ab.kprof", *script]
        left_s = ends_s - time.monotonic()
        if left_s < 1:
            return None
        done = subprocess.run(
            ["timeout", "-s", "INT", "-k", "10", f"{left_s:.0f}", *command],
            capture_output=True,
            text=True,
        )
    with suppress(ValueError, KeyError):
        told = json.loads(done.stdout)
        kept = ("a", "b", "plan", "claims", "protocol", "doubts")
        # Where things lie on that machine is nobody's business.
        facts = {name: fact for name, fact in told["facts"].items() if "/" not in fact}
        return {**{name: told[name] for name in kept}, "facts": facts}
    print(done.stderr[-1_500:], file=sys.stderr)
    return None


def rows_of(arms, num_tokens):
    """Return the rows of what the arms told."""
    rows = []
    for name, arm in arms.items():
        times = [one["step_ns"] for one in arm.rounds]
        rate = num_tokens / statistics.median(times) * 1e9 if times else None
        peak = max((one["peak_bytes"] for one in arm.rounds if "peak_bytes" in one), default=None)
        problem = arm.told.get("problem", "")
        rows.append(row(f"{name}-rate", rate, "tokens/s", "higher", problem=problem))
        rows.append(row(f"{name}-memory", peak, "bytes", "lower"))
        if name in SWAPS:
            rows.append(row(f"{name}-ready", ready_s(arm), "s", "lower", READY_S))
    for other in (PLAIN, *LIGERS):
        for swap in SWAPS:
            if other in arms and swap in arms:
                rows += rows_of_pair(swap, arms[swap], other, arms[other])
    return rows


def ready_s(arm):
    """Return what finding the sites and compiling took: the first step's time beyond another's."""
    if not arm.rounds or "first_step_s" not in arm.told:
        return None
    return arm.told["first_step_s"] - statistics.median(r["step_ns"] for r in arm.rounds) / 1e9


def rows_of_pair(swap, ours, other, theirs):
    """Return how much faster, and in how much less memory, one arm trains than another."""
    if min(len(theirs.rounds), len(ours.rounds)) < FEWEST_ROUNDS:
        return []
    pairs = [
        Pair((a["step_ns"],), (b["step_ns"],), a["place"] < b["place"], a["start_ns"])
        for a, b in zip(theirs.rounds, ours.rounds, strict=True)
    ]
    (claim,) = judge(Plan((STEP,), max_pairs=len(pairs)), pairs, are_all=True)
    between = claim.interval
    reach = FASTER if other == PLAIN else 1.0
    told = {"verdict": claim.verdict, "why": claim.why, "num_pairs": claim.num_pairs}
    if between is not None:
        told["interval"] = [1 / between.high, 1 / between.low]
    faster = 1 / between.ratio if between else None
    rows = [row(f"{swap}-to-{other}", faster, "x tokens/s", "higher", reach, **told)]
    peaks = [
        max((one["peak_bytes"] for one in arm.rounds if "peak_bytes" in one), default=None)
        for arm in (ours, theirs)
    ]
    if None not in peaks:
        rows.append(
            row(f"{swap}-memory-to-{other}", peaks[0] / peaks[1], "of its peak", "lower", 1.0)
        )
    return rows


def rows_of_comparison(compared):
    """Return the row of what `kprof ab` said."""
    interval = compared["claims"][0]["interval"] if compared else None
    if interval is None:
        return []
    return [
        row(
            "kprof-ab",
            1 / interval["ratio"],
            "x tokens/s",
            "higher",
            FASTER,
            interval=[1 / interval["high"], 1 / interval["low"]],
            verdict=compared["claims"][0]["verdict"],
            num_pairs=compared["claims"][0]["num_pairs"],
        )
    ]


def versions():
    """Return the version of the peer, where it is installed."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return {"liger-kernel": importlib.metadata.version("liger-kernel")}
    return {}


def table_of(rows):
    """Return the rows, a line each."""
    lines = []
    for one in rows:
        met = {True: "met", False: "NOT MET", None: ""}[one["met"]]
        value = "missing" if one["value"] is None else f"{one['value']:.5g} {one['unit']}"
        lines.append(
            f"{one['name']:34} {value:26} {one['reach'] or '':<6} {met:8} "
            f"{one.get('interval') or one.get('problem') or ''}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
