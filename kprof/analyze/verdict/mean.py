"""The ratio of B's mean to A's, which is what costs follow, with its interval."""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import numpy as np

from kprof.analyze.verdict.ranks import Floats

# The sequence is narrowest at about so many pairs.
NARROWEST_AT = 60


@dataclass(frozen=True)
class MeanLook:
    """The log of B's mean over A's, and the ends of its interval, along the last axis."""

    estimate: Floats
    low: Floats
    high: Floats
    at_least: Floats
    """A lower bound of the interval's confidence, one-sided."""
    at_most: Floats
    """An upper bound of the interval's confidence, one-sided."""

    def mirrored(self) -> MeanLook:
        """Return the look with A and B swapped."""
        return MeanLook(-self.estimate, -self.high, -self.low, -self.at_most, -self.at_least)


def look_at_mean(values: Floats, alpha: float, *, is_fixed: bool) -> MeanLook:
    """Return the ratio of means of A's and B's values, which lie along the last axis in pairs.

    The interval is Student's for a number of pairs set beforehand. Otherwise it is a confidence
    sequence: Robbins' normal mixture with the estimated variance, which holds asymptotically
    (Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas 2021, arXiv 2103.06476).

    A mean of rare stalls is skewed, and in half of the comparisons fewer are seen than there are.
    So where one side has the more extreme pairs, its end is computed with one more of them.
    """
    a, b = values
    num_pairs = a.shape[-1]
    mean_a, mean_b = a.mean(axis=-1), b.mean(axis=-1)
    estimate = np.log(mean_b) - np.log(mean_a)
    # The first-order terms of the log ratio: their mean is 0, and A and B enter alike.
    terms = np.sort(b / mean_b[..., None] - a / mean_a[..., None], axis=-1)
    boundary = _student if is_fixed else _sequence
    two_sided, one_sided = boundary(alpha, num_pairs), boundary(2 * alpha, num_pairs)
    above, below = _shift_and_error(terms), _shift_and_error(-terms[..., ::-1])
    return MeanLook(
        estimate,
        estimate - (below[0] + two_sided * below[1]),
        estimate + (above[0] + two_sided * above[1]),
        estimate - (below[0] + one_sided * below[1]),
        estimate + (above[0] + one_sided * above[1]),
    )


def _shift_and_error(terms: Floats) -> tuple[Floats, Floats]:
    """Return by how much one more extreme pair raises the mean, and the standard error with it.

    `terms` are in rising order. The extreme pair is the excess of the two largest over the two
    smallest, which is near 0 where both arms have the same extremes.
    """
    num_terms = terms.shape[-1] + 1
    most = np.maximum(terms[..., -2:].mean(axis=-1) + terms[..., :2].mean(axis=-1), 0.0)
    mean = most / num_terms
    squares = (terms**2).sum(axis=-1) + most**2 - num_terms * mean**2
    return mean, np.sqrt(np.maximum(squares, 0.0) / ((num_terms - 1) * num_terms))


def _student(alpha: float, degrees: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 1 - alpha / 2))


def _sequence(alpha: float, num_pairs: int) -> float:
    """Return the boundary in standard errors, two-sided."""
    odds = 2 * log(1 / alpha)
    # Near the best choice of the mixture's variance for the pairs named.
    size = num_pairs / NARROWEST_AT * (odds + log(odds))
    return float(((1 + 1 / size) * (odds + log(size + 1))) ** 0.5)
