"""How often any rule can find B 2 % faster where both variants have spikes.

python benchmarks/verdict_limits.py

One sample in twenty of both variants is late by 10 % on average. FASTER needs an upper bound of
B's mean, which such spikes make wide: the rule, Student's bound and an oracle stand side by side.
"""

import argparse
from pathlib import Path

import numpy as np
from evidence import RESULTS, row, write_evidence
from scipy.special import stdtr

from kprof.analyze.calibration.simulate import arms_of, independent, random_order, spikes
from kprof.analyze.calibration.tally import Known, with_all_pairs
from kprof.analyze.verdict.rule import levels_of
from kprof.comparison import Metric, Plan

SEED, COMPARISONS, DRAWS = 36, 4_000, 200_000
SOURCES = (
    "benchmarks/verdict_limits.py",
    "kprof/analyze/verdict/*.py",
    "kprof/analyze/calibration/simulate.py",
    "kprof/analyze/calibration/tally.py",
)
RATIO, SHARE, LENGTH = 0.98, 0.05, 0.1
"""B over A, and how often and by how much a sample of both is late."""
STALLS, STALL_LENGTH = 0.1, 0.4
"""Of a B that stalls as well, exponentially: its mean is 2 % above A's."""


def known_of(num_pairs, num_comparisons, rng):
    """Return comparisons of a B that is faster, with spikes in both."""
    shape = (num_comparisons, 2 * num_pairs)
    order = random_order(num_comparisons, num_pairs, rng)
    a, b = arms_of(independent(shape, rng) + spikes(shape, rng), order)
    return Known(RATIO - 1, float(np.log(RATIO)), a, b + np.log(RATIO), order)


def power_of_rule(num_pairs, num_comparisons, rng):
    """Return how often the rule says FASTER, and how often Student's bound of the mean lets it."""
    known = known_of(num_pairs, num_comparisons, rng)
    levels = levels_of(Plan((Metric("time", "ns"),), max_pairs=num_pairs, seed=0))
    is_faster = with_all_pairs(known, levels).verdict.is_faster
    excess = np.exp(known.b) - np.exp(levels.margin + known.a)
    error = excess.std(axis=1, ddof=1) / num_pairs**0.5
    chance = 1 - stdtr(num_pairs - 1, -excess.mean(axis=1) / error)
    return 100 * is_faster.mean(), 100 * (chance < levels.both).mean()


def power_of_oracle(num_pairs, most_false, rng):
    """Return the power of the most powerful test (Neyman and Pearson) against a B that stalls.

    It knows both distributions, and has no noise besides spikes and stalls.
    """
    shape = (DRAWS, num_pairs)
    late = (rng.random(shape) < SHARE) * rng.exponential(LENGTH, shape)
    stalled = (rng.random(shape) < SHARE) * rng.exponential(LENGTH, shape)
    stalled += (rng.random(shape) < STALLS) * rng.exponential(STALL_LENGTH, shape)
    return 100 * (evidence(late) <= np.quantile(evidence(stalled), most_false)).mean()


def evidence(late):
    """Return the log likelihood ratio of a B that stalls over one that does not."""
    short, long = np.exp(-late / LENGTH) / LENGTH, np.exp(-late / STALL_LENGTH) / STALL_LENGTH
    both = (long * STALL_LENGTH - short * LENGTH) / (STALL_LENGTH - LENGTH)
    of_stalls = SHARE * (1 - STALLS) * short + (1 - SHARE) * STALLS * long + SHARE * STALLS * both
    ratio = np.where(late == 0, 1 - STALLS, of_stalls / (SHARE * short))
    return np.log(ratio).sum(axis=1)


def main():
    """Measure the power of the rule and of others, print it and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--result", type=Path)
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    args = parser.parse_args()
    rng = np.random.default_rng(SEED)
    short, student = power_of_rule(40, COMPARISONS, rng)
    long, _ = power_of_rule(160, COMPARISONS // 4, rng)
    oracle = power_of_oracle(40, 0.022, rng)
    rows = [
        row("rule-40-pairs", short, "%", "higher"),
        row("rule-160-pairs", long, "%", "higher"),
        row("student-40-pairs", student, "%", "higher"),
        row("oracle-40-pairs", oracle, "%", "higher", says="2.2 % false"),
    ]
    for one in rows:
        print(f"{one['name']:20} {one['value']:5.1f} %")
    write_evidence(
        args.result or RESULTS / "verdict_limits_cpu_2026-11.json",
        "how often B 2 % faster is found with spikes in both variants",
        rows,
        SOURCES,
        commit=args.commit,
        num_comparisons=COMPARISONS,
        seed=SEED,
    )


if __name__ == "__main__":
    main()
