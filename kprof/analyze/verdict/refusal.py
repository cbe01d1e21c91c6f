"""Why pairs can carry no verdict: each way in which an honest interval would still mislead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb

import numpy as np

from kprof.analyze.verdict.ranks import Floats, walsh_averages
from kprof.analyze.verdict.rule import FEWEST_PAIRS
from kprof.comparison import Metric, Pair

MOST_LEFT_OUT = 0.2
# A fair coin falls as unevenly as this in one run out of ten thousand.
LEAST_CHANCE_OF_ORDER = 1e-4
# Two halves of equal pairs are as far apart as this in one run out of ten thousand.
LEAST_DEVIATIONS = 3.9
# A tick of the clock up to this share of the smallest effect cannot turn a verdict.
HARMLESS_TICK = 0.2
# A tick beyond this share of the smallest effect turns verdicts, however pairs scatter.
MOST_TICK = 0.5
COUNTED_UNITS = {"B", "KiB", "MiB", "GiB", "bytes", "tokens", "count", ""}
"""What is counted and not timed may well be the same in every sample."""


def reason_to_refuse(
    metric: Metric, values: Floats, pairs: Sequence[Pair], smallest_effect: float
) -> str:
    """Return why there can be no verdict on a metric, or nothing.

    `values` holds A's and B's row, of those `pairs` that count.
    """
    counting = [pair for pair in pairs if not pair.problem]
    reason = _reason_in_pairs(pairs, counting)
    if not reason and not np.isfinite(values).all():
        bad = int((~np.isfinite(values)).sum())
        reason = f"{bad} of {values.size} values are no finite number"
    if not reason and (values <= 0).any():
        bad = int((values <= 0).sum())
        reason = f"{bad} of {values.size} values are zero or negative, so there is no ratio"
    if reason:
        return reason
    return _reason_in_ticks(metric, values, smallest_effect) or _reason_in_time(
        np.log(values[1]) - np.log(values[0]), counting, smallest_effect
    )


def _reason_in_pairs(pairs: Sequence[Pair], counting: Sequence[Pair]) -> str:
    num_left_out = len(pairs) - len(counting)
    causes = Counter(pair.problem for pair in pairs if pair.problem)
    why = "; ".join(f"{cause}: {number}" for cause, number in causes.most_common(3))
    if len(counting) < FEWEST_PAIRS:
        left_out = f", {num_left_out} are left out ({why})" if num_left_out else ""
        return f"{len(counting)} pairs count, it takes {FEWEST_PAIRS}{left_out}"
    if num_left_out > MOST_LEFT_OUT * len(pairs):
        return f"{num_left_out} of {len(pairs)} pairs are left out ({why})"
    num_a_first = sum(pair.is_a_first for pair in counting)
    if chance_of_order(num_a_first, len(counting)) < LEAST_CHANCE_OF_ORDER:
        return f"A came first in {num_a_first} of {len(counting)} pairs: no random order does that"
    return ""


def chance_of_order(num_a_first: int, num_pairs: int) -> float:
    """Return the two-sided chance that a fair coin puts A first as seldom, or as often."""
    fewer = min(num_a_first, num_pairs - num_a_first)
    as_uneven: int = 2 * sum(comb(num_pairs, k) for k in range(fewer + 1))
    return min(1.0, as_uneven / float(2**num_pairs))


def _reason_in_ticks(metric: Metric, values: Floats, smallest_effect: float) -> str:
    """Say when the values show the steps of their clock rather than the workload.

    Rounding evens out where the pairs scatter over several ticks. Where half of them lie within
    one, the middle of all is where the tick is, not where the truth is. It goes in half ticks
    however they scatter, so that a tick of more than half of the effect is too coarse anyway.
    """
    distinct = np.unique(values)
    if len(distinct) == 1:
        is_counted = metric.unit in COUNTED_UNITS
        return "" if is_counted else f"every value is {distinct[0]:g} {metric.unit}"
    middle = float(np.median(values))
    tick = float(np.diff(distinct).min())
    apart = values[1] - values[0]
    near = np.abs(apart - np.median(apart)) < tick / 2
    effect = smallest_effect * middle
    is_repeated = 2 * len(distinct) <= values.size
    is_coarse = tick > HARMLESS_TICK * effect and near.mean() > 0.5
    is_coarse |= tick > MOST_TICK * effect and is_repeated
    if not is_coarse or metric.unit in COUNTED_UNITS:
        return ""
    return (
        f"the values go in steps of {tick:.3g} {metric.unit}, {100 * tick / middle:.2g} % of "
        "their size: too coarse for the effect that is sought, so time more calls in one sample"
    )


def _reason_in_time(differences: Floats, counting: Sequence[Pair], smallest_effect: float) -> str:
    """Say when the ratio itself was another in the second half than in the first.

    Drift does no harm, for it is in A and in B. What changes between the two has no one ratio.
    """
    in_time = differences[np.argsort([pair.start_ns for pair in counting], kind="stable")]
    halves = np.array_split(in_time, 2)
    first, second = (float(np.median(walsh_averages(half))) for half in halves)
    is_large = abs(second - first) > np.log1p(smallest_effect)
    if not is_large or _rank_sum_deviations(*halves) < LEAST_DEVIATIONS:
        return ""
    return (
        f"B over A was {np.exp(first):.4f} in the first half of the pairs "
        f"and {np.exp(second):.4f} in the second"
    )


def _rank_sum_deviations(first: Floats, second: Floats) -> float:
    """Return how many standard deviations the rank sum of two samples is from what is expected."""
    above = np.sign(second[:, None] - first[None, :]).sum() / 2
    num_first, num_second = len(first), len(second)
    variance = num_first * num_second * (num_first + num_second + 1) / 12
    return float(abs(above) / variance**0.5)
