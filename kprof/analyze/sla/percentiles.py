"""Percentiles of a sample by inverted CDF, with bounds by order statistics.

No distribution is assumed: of n independent values, the number at or below the p-quantile is
binomial (Conover, Practical Nonparametric Statistics, 3rd ed., section 3.2).
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

CONFIDENCE = 0.99
"""Confidence of every bound, one-sided."""
MOST_SAMPLES = 100_000_000
"""Beyond so many a verdict is as good as out of reach."""
LEAST_TAIL = Fraction(1, 10**7)
"""Smallest tail: a smaller one needs over about half of the maximum samples for any bound."""


class Ranks(NamedTuple):
    """Which of n values in ascending order, counted from 1; None: n is too small for a bound."""

    low: int | None
    estimate: int
    high: int | None


@lru_cache(maxsize=1024)
def ranks_of(num_samples: int, quantile: Fraction, confidence: float = CONFIDENCE) -> Ranks:
    """Return the ranks of a quantile's estimate and of its one-sided confidence bounds.

    The high rank is the smallest r with BinomCDF(r - 1; n, p) >= confidence, the low one the
    largest with BinomCDF(r - 1; n, p) <= 1 - confidence.
    """
    from scipy import stats  # Half a second, which `--help` must not wait for.

    count = stats.binom(num_samples, float(quantile))
    high = int(count.ppf(confidence)) + 1
    low = int(count.ppf(1 - confidence))
    # ppf gives the smallest value that reaches a probability; below it lies less than that.
    low += int(count.cdf(low) <= 1 - confidence)
    estimate = max(math.ceil(num_samples * quantile), 1)
    return Ranks(low or None, estimate, high if high <= num_samples else None)


def is_provable(quantile: Fraction) -> bool:
    """Tell whether a practical number of samples bounds a quantile."""
    return LEAST_TAIL <= quantile <= 1 - LEAST_TAIL


@lru_cache
def least_samples(quantile: Fraction, confidence: float = CONFIDENCE) -> int:
    """Return how many samples it takes until the largest of them bounds the quantile."""
    n = max(math.floor(math.log(1 - confidence) / math.log(quantile)), 1)
    while float(quantile) ** n > 1 - confidence:
        n += 1
    return n


def samples_to_pass(quantile: Fraction, share_missed: float) -> int | None:
    """Return how many samples would prove a target of which this share is slower than it.

    None: with such a share it is not met, or too nearly missed to be proven.
    """
    if share_missed >= 1 - quantile:
        return None
    n = least_samples(quantile)
    while n <= MOST_SAMPLES:
        if _proves(n, quantile, share_missed):
            return _smallest(n // 2, n, quantile, share_missed)
        n *= 2
    return None


def _proves(num_samples: int, quantile: Fraction, share_missed: float) -> bool:
    """Tell whether n samples prove the target if this share of them, rounded up, misses it."""
    from scipy import stats  # Half a second, which `--help` must not wait for.

    missed = math.ceil(share_missed * num_samples)
    return bool(stats.binom.cdf(missed, num_samples, 1 - float(quantile)) <= 1 - CONFIDENCE)


def _smallest(low: int, high: int, quantile: Fraction, share_missed: float) -> int:
    """Bisect for the smallest number that proves it, to a tenth of a percent."""
    while high - low > max(1, high // 1000):
        middle = (low + high) // 2
        if _proves(middle, quantile, share_missed):
            high = middle
        else:
            low = middle
    return high


class ShareBounds(NamedTuple):
    """A share of one with its one-sided bounds (Clopper and Pearson)."""

    low: float
    estimate: float
    high: float


def bound_share(
    hits: float,
    num_samples: float,
    num_independent: float | None = None,
    confidence: float = CONFIDENCE,
) -> ShareBounds:
    """Return the share of hits with one-sided bounds, of samples that count as so many."""
    from scipy import stats  # Half a second, which `--help` must not wait for.

    each = 1.0 if num_independent is None else num_independent / num_samples
    found, others = hits * each, (num_samples - hits) * each
    low = float(stats.beta.ppf(1 - confidence, found, others + 1)) if hits else 0.0
    high = float(stats.beta.ppf(confidence, found + 1, others)) if hits < num_samples else 1.0
    return ShareBounds(low, hits / num_samples, high)
