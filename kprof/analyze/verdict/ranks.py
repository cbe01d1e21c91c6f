"""Wilcoxon's signed ranks: estimate, interval, test for a number of pairs.

Everything works along the last axis, for one comparison or for thousands of simulated ones.
A difference is ln(B/A) of a pair. A Walsh average is the mean of two differences, or one of them
itself: their median estimates the shift (Hodges and Lehmann 1963), how many lie below a value is
the signed-rank statistic of that value (Tukey 1949), and so their order gives the interval.
"""

from __future__ import annotations

from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# The distribution is exact up to here; above, a normal with its mean and variance is as good.
MOST_EXACT = 300


def walsh_averages(differences: Floats) -> Floats:
    """Return the n(n+1)/2 means of two differences, each with itself too, in no order."""
    first, second = np.triu_indices(differences.shape[-1])
    return np.asarray((differences[..., first] + differences[..., second]) / 2)


@lru_cache(maxsize=64)
def null_distribution(num_pairs: int) -> Floats:
    """Return the chance that the statistic is at most 0, 1, 2, … when every sign is a fair coin.

    Each rank is in the sum or not, so the exact distribution grows rank by rank.
    """
    chances: Floats = np.zeros(num_pairs * (num_pairs + 1) // 2 + 1)
    chances[0] = 1.0
    for rank in range(1, num_pairs + 1):
        with_rank = np.concatenate([np.zeros(rank), chances[:-rank]])
        chances = (chances + with_rank) / 2
    at_most: Floats = np.cumsum(chances)
    return at_most


def tail(num_pairs: int, statistic: npt.NDArray[np.int64]) -> Floats:
    """Return the chance of a statistic as small as this one."""
    if num_pairs <= MOST_EXACT:
        return np.asarray(null_distribution(num_pairs)[statistic])
    mean = num_pairs * (num_pairs + 1) / 4
    deviation = np.sqrt(mean * (2 * num_pairs + 1) / 6)
    normal = NormalDist(mean, deviation)
    chances: Floats = np.vectorize(normal.cdf, otypes=[float])(statistic + 0.5)
    return chances


def averages_to_leave_out(num_pairs: int, alpha: float) -> int:
    """Return how many Walsh averages lie outside the interval at either end; -1: there is none.

    The largest number whose chance, at both ends together, is at most `alpha`.
    """
    if num_pairs <= MOST_EXACT:
        within = np.searchsorted(2 * null_distribution(num_pairs), alpha, side="right")
        return int(within) - 1
    mean = num_pairs * (num_pairs + 1) / 4
    deviation = float(np.sqrt(mean * (2 * num_pairs + 1) / 6))
    return int(np.floor(NormalDist(mean, deviation).inv_cdf(alpha / 2) - 0.5))


def interval(averages: Floats, num_pairs: int, alpha: float) -> tuple[Floats, Floats]:
    """Return the ends of the closed interval that misses the truth at most `alpha` of the time.

    Both ends belong to it: with ties, and so with a coarse clock, it can only be wider than it
    need be. Too few pairs for this `alpha` leave it without ends.
    """
    outside = averages_to_leave_out(num_pairs, alpha)
    if outside < 0:
        return np.full(averages.shape[:-1], -np.inf), np.full(averages.shape[:-1], np.inf)
    last = averages.shape[-1] - 1
    ordered = np.partition(averages, (outside, last - outside), axis=-1)
    return ordered[..., outside], ordered[..., last - outside]


def p_value(averages: Floats, num_pairs: int) -> Floats:
    """Return the two-sided chance of such ranks when A and B are alike.

    It is at most `alpha` exactly when the interval at `alpha` leaves out 0. Without ties and
    zeros it is that of `scipy.stats.wilcoxon`; an average of 0 counts for either side.
    """
    not_above = (averages <= 0).sum(axis=-1)
    not_below = (averages >= 0).sum(axis=-1)
    return np.minimum(1.0, 2 * tail(num_pairs, np.minimum(not_above, not_below)))
