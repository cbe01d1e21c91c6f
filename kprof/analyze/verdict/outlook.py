"""How many more pairs would probably decide, from the spread and the estimate so far."""

from __future__ import annotations

from math import ceil
from statistics import NormalDist

import numpy as np

from kprof.analyze.verdict import ranks
from kprof.analyze.verdict.ranks import Floats
from kprof.analyze.verdict.rule import Levels

PROBABLY = 0.8
"""The chance of an answer with so many pairs, were the estimate the truth."""
FURTHEST = 100
"""More than so many times the pairs at hand is no forecast any more."""


def pairs_needed(differences: Floats, levels: Levels) -> int | None:
    """Return how many more pairs a longer plan would take for either answer; None: cannot tell.

    Either the interval is to leave out 1, or it is to fit within the smallest effect: the one
    that comes first.
    """
    num_pairs = len(differences)
    averages = ranks.walsh_averages(differences)
    low, high = ranks.interval(averages, num_pairs, levels.fixed)
    width, estimate = float(high - low), abs(float(np.median(averages)))
    if not np.isfinite(width) or width <= 0:
        return None
    quantile_of = NormalDist().inv_cdf
    apart, alike = quantile_of(1 - levels.fixed / 2), quantile_of(1 - levels.fixed)
    spread = width / (2 * apart) * float(num_pairs) ** 0.5
    quantile, both_sides = quantile_of(PROBABLY), quantile_of((1 + PROBABLY) / 2)
    room = levels.margin - estimate
    # Near no difference the interval can stick out at either end, else only at the nearer one.
    least_alike = alike + (both_sides if estimate < levels.margin / 4 else quantile)
    answers = [((apart + quantile) * spread / estimate) ** 2] if estimate > 0 else []
    answers += [(least_alike * spread / room) ** 2] if room > 0 else []
    if not answers or min(answers) > FURTHEST * num_pairs:
        return None
    more: int = ceil(min(answers)) - num_pairs
    return max(1, more)
