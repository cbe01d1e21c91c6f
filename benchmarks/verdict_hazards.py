"""How often a verdict is false where two variants differ in more than a constant ratio.

python benchmarks/verdict_hazards.py

Every comparison is taken in pairs and judged by the public rule, as `kprof ab` does it.
"""

import argparse
from collections import Counter
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from evidence import RESULTS, row, write_evidence

from kprof.ab import exit_code_of
from kprof.analyze.verdict import is_enough, judge
from kprof.analyze.verdict.plausibility import CALL_NS, reason_below_floor
from kprof.comparison import Metric, Pair, Plan

SPREAD, SMALLEST_EFFECT, BASE_NS = 0.007, 0.01, 1e7
SOURCES = ("benchmarks/verdict_hazards.py", "kprof/analyze/verdict/*.py", "kprof/ab.py")
# `kprof ab` looks after every pair, which takes six times as long and stops a few pairs sooner.
BETWEEN_LOOKS = 6
TIME = Metric("step time", "ns")


def noisy(rng, ratio=1.0):
    """Return a time of this ratio to A's, with normal noise."""
    return BASE_NS * ratio * float(np.exp(rng.normal(0, SPREAD)))


def constant(ratio):
    """Return a hazard that is none: B has this ratio all the time."""

    def sample(rng, state, arm, number):
        return noisy(rng, ratio if arm == "B" else 1.0)

    return sample


def stalls(share):
    """Return a B that is 2 % faster except for stalls, which make its mean 2 % slower."""
    stall = 0.04 / share

    def sample(rng, state, arm, number):
        if arm == "A":
            return noisy(rng)
        return noisy(rng, 0.98 + stall * (rng.random() < share))

    return sample


def carry_over(size, ratio=1.0):
    """Return variants of which the sample after one of B is slower."""

    def sample(rng, state, arm, number):
        slower = 1 + size * (state.get("before") == "B")
        state["before"] = arm
        return noisy(rng, slower * (ratio if arm == "B" else 1.0))

    return sample


def changing(first, num_before, later):
    """Return a B whose ratio changes once after so many pairs."""

    def sample(rng, state, arm, number):
        return noisy(rng, 1.0 if arm == "A" else first if number < num_before else later)

    return sample


def ticking(tick, spread, ratio):
    """Return readings of a clock with ticks, with jitter of a twentieth of a tick."""

    def sample(rng, state, arm, number):
        base = state.setdefault("base", 1 + 0.1 * rng.random())
        true = base * (ratio if arm == "B" else 1.0) * np.exp(rng.normal(0, spread))
        return BASE_NS * float(np.round(true / tick) * tick + rng.normal(0, tick / 20))

    return sample


def memoised(rng, state, arm, number):
    """Return 40 ns of B, which looks its result up."""
    return noisy(rng) if arm == "A" else 40 * float(np.exp(rng.normal(0, 0.05)))


FASTER, SLOWER, PROVEN = {"FASTER"}, {"SLOWER"}, {"FASTER", "SLOWER", "SAME"}
# Name, samples, most pairs, false verdicts; an exit code of 1 instead of verdicts where "exit".
HAZARDS = [
    *((f"same, {n} pairs", constant(1.0), n, FASTER | SLOWER) for n in (42, 162)),
    *((f"2 % slower, {n} pairs", constant(1.02), n, FASTER | {"SAME"}) for n in (42, 162)),
    *((f"2 % faster, {n} pairs", constant(0.98), n, SLOWER | {"SAME"}) for n in (42, 162)),
    ("0.5 % slower, 42 pairs, exit code 1", constant(1.005), 42, "exit"),
    ("0.5 % slower, 162 pairs, exit code 1", constant(1.005), 162, "exit"),
    *(
        (f"stalls in {s:.0%} of B, {n} pairs", stalls(s), n, FASTER)
        for s in (0.05, 0.1, 0.25)
        for n in (42, 162)
    ),
    ("3 % after B, 42 pairs", carry_over(0.03), 42, FASTER | SLOWER),
    ("3 % after B, 162 pairs", carry_over(0.03), 162, FASTER | SLOWER),
    ("5 % after B and B 2 % faster", carry_over(0.05, 0.98), 42, SLOWER),
    ("4 % slower for 12 pairs, then 4 % faster", changing(1.04, 12, 0.96), 162, SLOWER),
    ("4 % faster for 12 pairs, then 4 % slower", changing(0.96, 12, 1.04), 162, FASTER),
    ("30 % slower for 8 pairs, then 5 % faster", changing(1.3, 8, 0.95), 162, SLOWER),
    ("30 % slower for 15 pairs, then 5 % faster", changing(1.3, 15, 0.95), 162, SLOWER),
    ("ticks of 1 %, noise 1 %, B 1.5 % slower", ticking(0.01, 0.01, 1.015), 42, {"SAME", "FASTER"}),
    ("ticks of 2 %, noise 2 %, B 1.5 % slower", ticking(0.02, 0.02, 1.015), 42, {"SAME", "FASTER"}),
    ("ticks of 2 %, noise 0.2 %, B 1.5 % slower", ticking(0.02, 0.002, 1.015), 42, {"SAME"}),
    ("memoised B, 40 ns", memoised, 42, PROVEN),
]


def verdict_of(sample, most, rng):
    """Return the verdict and exit code of one comparison, and how many pairs it took."""
    plan, pairs, state = Plan((TIME,), max_pairs=most, seed=0), [], {}
    while len(pairs) % BETWEEN_LOOKS or not is_enough(plan, pairs):
        number, is_a_first = len(pairs), bool(rng.random() < 0.5)
        values = {arm: sample(rng, state, arm, number) for arm in ("AB" if is_a_first else "BA")}
        pairs.append(Pair((values["A"],), (values["B"],), is_a_first, number))
    (claim,) = judge(plan, pairs)
    if reason_below_floor(pairs, CALL_NS, "a step"):
        return "INVALID", 3, len(pairs)
    return claim.verdict, exit_code_of(claim, SMALLEST_EFFECT), len(pairs)


def one_of(place, seed):
    """Return the outcome of one comparison of the hazard at this place."""
    _, sample, most, _ = HAZARDS[place]
    return verdict_of(sample, most, np.random.default_rng((36, place, seed)))


def main():
    """Judge so many comparisons of each hazard, print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comparisons", type=int, default=200)
    parser.add_argument("--result", type=Path)
    args = parser.parse_args()
    rows = []
    for place, (name, _, _, false) in enumerate(HAZARDS):
        with Pool() as pool:
            found = pool.starmap(one_of, [(place, seed) for seed in range(args.comparisons)])
        num_false = sum(code == 1 if false == "exit" else said in false for said, code, _ in found)
        verdicts = dict(Counter(said for said, _, _ in found))
        pairs = sum(taken for _, _, taken in found) / len(found)
        share = 100 * num_false / len(found)
        rows.append(row(name, share, "%", "lower", verdicts=verdicts, pairs=round(pairs, 1)))
        print(f"{name:45} false {share:5.1f} %  {pairs:5.1f} pairs  {verdicts}", flush=True)
    write_evidence(
        args.result or RESULTS / "verdict_hazards_cpu_2026-11.json",
        "false verdicts where two variants differ in more than a constant ratio",
        rows,
        SOURCES,
        num_comparisons=args.comparisons,
        seed=36,
    )


if __name__ == "__main__":
    main()
