"""Claims on a step restated per token: the same verdicts, in the unit of users."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite
from statistics import median

from kprof.comparison import Claim, Comparison, Interval, Metric

ENERGY = Metric("energy per token", "J")
RATE = Metric("throughput", "tok/s", "higher")
OF_A_STEP = {"step time": RATE, "energy per step": ENERGY}
NS_PER_S = 1e9


@dataclass(frozen=True)
class Derived:
    """A claim on a metric that follows from another, whose verdict it shares."""

    claim: Claim
    a: float
    """The median of A's values that count."""
    b: float


def per_token(comparison: Comparison) -> tuple[Derived, ...]:
    """Return the claims per token; none where the tokens per step are not given.

    A step of A and one of B have equally many, so the test and its interval are those of the step:
    nothing new is claimed, and no error is added.
    """
    tokens = comparison.tokens_per_step
    if tokens is None:
        return ()
    found = []
    for place, claim in enumerate(comparison.claims):
        metric = OF_A_STEP.get(claim.metric.name)
        middles = _medians(comparison, place)
        if metric is None or middles is None:
            continue
        a, b = (_of_a_token(value, metric, tokens) for value in middles)
        interval = _inverted(claim.interval) if metric == RATE else claim.interval
        mean = _inverted(claim.mean) if metric == RATE else claim.mean
        found.append(Derived(replace(claim, metric=metric, interval=interval, mean=mean), a, b))
    return tuple(found)


def _medians(comparison: Comparison, place: int) -> tuple[float, float] | None:
    """Return the middle of A's and of B's values; None where some value is none."""
    good = [pair for pair in comparison.pairs if not pair.problem]
    of_a, of_b = [pair.a[place] for pair in good], [pair.b[place] for pair in good]
    is_known = all(isfinite(value) and value > 0 for value in (*of_a, *of_b))
    return (median(of_a), median(of_b)) if good and is_known else None


def _of_a_token(value: float, metric: Metric, tokens: float) -> float:
    return tokens * NS_PER_S / value if metric == RATE else value / tokens


def _inverted(interval: Interval | None) -> Interval | None:
    if interval is None:
        return None
    ratio, low, high = 1 / interval.ratio, 1 / interval.high, 1 / interval.low
    return replace(interval, ratio=ratio, low=low, high=high)
