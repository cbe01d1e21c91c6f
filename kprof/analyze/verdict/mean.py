"""The ratio of B's mean to A's, which is what costs follow, with its interval."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log

import numpy as np
import numpy.typing as npt

from kprof.analyze.verdict.ranks import Floats

Flags = npt.NDArray[np.bool_]

# The sequence is narrowest at about so many pairs.
NARROWEST_AT = 60
FEWEST_SAMPLES = 100
"""Samples of B from which on a stall of one sample in twenty is rarely missed by all of them: in
0.6 % of comparisons, 0.95 to the power of 100."""
SHARE_OF_STALLS = 0.2
"""The part of the error that the mean's bound may make with so many samples, 1 % of 5 %. With fewer
it has all of it: rare stalls are missed more often than that by any bound."""
NUM_HALVINGS = 40
# Beyond so many standard deviations the saddlepoint's formula is exact enough; nearer, it divides 0
# by 0, and the chance is near one half.
LEAST_DEVIATIONS = 0.3


@dataclass(frozen=True)
class MeanLook:
    """The log of B's mean over A's, and the ends of its interval, along the last axis."""

    estimate: Floats
    low: Floats
    high: Floats
    is_no_more: Flags
    """B's mean is proven to be at most the margin above A's, also with the stalls unseen."""
    is_no_less: Flags
    """B's mean is proven to be at most the margin below A's."""

    def mirrored(self) -> MeanLook:
        """Return the look with A and B swapped."""
        return MeanLook(-self.estimate, -self.high, -self.low, self.is_no_less, self.is_no_more)


def look_at_mean(
    values: Floats, alpha: float, margin: float, num_samples: int, *, is_fixed: bool
) -> MeanLook:
    """Return the ratio of means of A's and B's values, which lie along the last axis in pairs.

    `num_samples` is how many samples of B they are of.

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
    width = boundary(alpha, num_pairs)
    above, below = _shift_and_error(terms), _shift_and_error(-terms[..., ::-1])
    low = estimate - (below[0] + width * below[1])
    high = estimate + (above[0] + width * above[1])
    error = alpha * (SHARE_OF_STALLS if num_samples >= FEWEST_SAMPLES else 1.0)
    is_no_more = chance_of_more(a, b, margin) < error
    is_no_less = chance_of_more(b, a, margin) < error
    if not is_fixed:
        # Looks after many pairs err together: the sequence, which holds at all of them, as well.
        one_sided = boundary(2 * alpha, num_pairs)
        is_no_more &= estimate + (above[0] + one_sided * above[1]) < margin
        is_no_less &= estimate - (below[0] + one_sided * below[1]) > -margin
    return MeanLook(estimate, low, high, is_no_more, is_no_less)


def chance_of_more(a: Floats, b: Floats, margin: float) -> Floats:
    """Return the error of saying that B's mean is at most the margin above A's, up to one half.

    The pairs and one more of the most extreme get random weights (Dirichlet, all of 1): the chance
    that the weighted mean is above the margin is the error. Where k of n pairs stall, and all as
    long, it is that of Clopper and Pearson's upper bound of their share
    (Learned-Miller and Thomas 2019, arXiv 1905.06208; Rubin 1981). The chance of a sum of weighted
    exponentials comes from its saddlepoint (Lugannani and Rice 1980).

    The extremes of A and of B cancel, the largest against the largest: where both stall as often
    and as long, that is no evidence against B.
    """
    excess = (b - exp(margin) * a) / a.mean(axis=-1, keepdims=True)
    middle = np.median(excess, axis=-1, keepdims=True)
    from_middle = np.sort(excess - middle, axis=-1)
    half = from_middle.shape[-1] // 2
    both = from_middle[..., :half] + from_middle[..., ::-1][..., :half]
    one_more = np.maximum(from_middle[..., :1] + from_middle[..., -1:], 0.0)
    rest = np.zeros((*both.shape[:-1], from_middle.shape[-1] - half))
    return _chance_of_positive(np.concatenate([both, rest, one_more], axis=-1) + middle)


def _chance_of_positive(terms: Floats) -> Floats:
    """Return the chance that a mean of `terms` with Dirichlet weights of 1 is positive."""
    from scipy.special import ndtr

    most, mean = terms.max(axis=-1), terms.mean(axis=-1)
    is_unclear = (most > 0) & (mean < 0)
    chance = np.where(most <= 0, 0.0, 0.5)
    scaled = terms[is_unclear] / most[is_unclear][..., None]
    low, high = np.zeros(len(scaled)), np.ones(len(scaled))
    for _ in range(NUM_HALVINGS):
        tilt = (low + high) / 2
        is_low = (scaled / (1 - tilt[:, None] * scaled)).sum(axis=-1) < 0
        low, high = np.where(is_low, tilt, low), np.where(is_low, high, tilt)
    tilt = (low + high) / 2
    left = 1 - tilt[:, None] * scaled
    away = np.sqrt(np.maximum(2 * np.log(left).sum(axis=-1), LEAST_DEVIATIONS**2))
    spread = tilt * np.sqrt(((scaled / left) ** 2).sum(axis=-1))
    density = np.exp(-(away**2) / 2) / np.sqrt(2 * np.pi)
    tail = ndtr(-away) + density * (1 / spread - 1 / away)
    chance[is_unclear] = np.where(away > LEAST_DEVIATIONS, np.clip(tail, 0.0, 0.5), 0.5)
    return chance


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
