"""Pairs for verdicts: of one ratio or of any, with noise that is the same each time."""

from dataclasses import replace

import numpy as np

from kprof.analyze.verdict import judge
from kprof.comparison import Metric, Pair, Plan

TIME, RATE, MEMORY = Metric("step", "ms"), Metric("rate", "1/s", "higher"), Metric("peak", "B")


def plan_of(*metrics, **options):
    """Return a plan for these metrics, for time where there are none."""
    return Plan(metrics or (TIME,), **options)


def pair_of(a, b, number=0, problem=""):
    """Return a pair of one metric, or of several, in an order that looks random."""
    a, b = (x if isinstance(x, tuple) else (x,) for x in (a, b))
    return Pair(a, b, is_a_first=number % 3 != 1, start_ns=number, problem=problem)


def pairs_with(ratio, num_pairs=40, spread=0.005, seed=0):
    """Return pairs in which B takes `ratio` of A's time, each sample with noise."""
    a, b = 10 * np.exp(np.random.default_rng(seed).normal(0, spread, (2, num_pairs)))
    values = zip(a.tolist(), (ratio * b).tolist(), strict=True)
    return [pair_of(x, y, number) for number, (x, y) in enumerate(values)]


def verdict_of(pairs, *metrics, **options):
    """Return the only claim about these pairs."""
    (claim,) = judge(plan_of(*metrics, **options), pairs)
    return claim


def numbered(pairs):
    """Return the pairs one after the other in time."""
    return [replace(pair, start_ns=number) for number, pair in enumerate(pairs)]
