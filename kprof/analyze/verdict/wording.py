"""The sentence beside a verdict: what decided, or what was in the way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kprof.analyze.verdict.mean import FEWEST_SAMPLES
from kprof.analyze.verdict.ranks import walsh_averages
from kprof.comparison import Claim, Metric, Pair, Plan

TIMES = {"s", "ms", "us", "µs", "ns"}


def say_why(
    plan: Plan, claim: Claim, ratio: float, pairs: Sequence[Pair], index: int, is_clear: bool
) -> str:
    """Return what decided, with the ratio with and without the pairs left out if it differs.

    `is_clear` says that the pairs alone would give a verdict.
    """
    effect = f"the {100 * plan.smallest_effect:g} % that matters"
    if claim.verdict == "SAME":
        why = f"{_change(claim.metric, ratio)}, less than {effect}{_say_tests(plan, claim)}."
    elif claim.interval is None:
        why = f"{claim.num_pairs} pairs are too few for an interval of this confidence."
    elif claim.verdict == "INCONCLUSIVE" and is_clear:
        why = _say_mean_differs(plan, claim)
    elif claim.verdict == "INCONCLUSIVE":
        why = f"The interval holds both 1 and differences beyond {effect}."
    elif claim.is_material:
        why = f"The whole interval lies beyond {effect}."
    else:
        why = f"The interval leaves out 1, but a part of it lies within {effect}."
    why += _say_stop(plan, claim, pairs) + _say_unseen(claim, pairs)
    return why + _say_left_out(plan, ratio, pairs, index)


def _say_mean_differs(plan: Plan, claim: Claim) -> str:
    """Say how the mean contradicts the pairs, or leaves room for it."""
    of_pairs, of_mean = claim.interval, claim.mean
    if of_pairs is None or of_mean is None:
        return ""
    median, mean = (_change(claim.metric, one.ratio) for one in (of_pairs, of_mean))
    ends = f"{_percent(of_mean.low)} to {_percent(of_mean.high)}"
    said = f"B is {median} in the median pair and {mean} in the mean ({ends})"
    if not of_mean.low <= 1 <= of_mean.high:
        return f"{said}: the two contradict each other, as where some samples of B stall."
    return f"{said}: its mean may be worse by more than {100 * plan.smallest_effect:g} %."


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.2g} %"


def _change(metric: Metric, ratio: float) -> str:
    """Say how far B is from A, in the words of the metric."""
    more, less = ("slower", "faster") if metric.unit in TIMES else ("more", "less")
    if abs(ratio - 1) < 0.00005:
        return "No difference seen"
    return f"{100 * abs(ratio - 1):.2g} % {more if ratio > 1 else less}"


def _say_tests(plan: Plan, claim: Claim) -> str:
    """Explain SAME beside an interval that sticks out: its error at either end is half of it."""
    most, interval = 1 + plan.smallest_effect, claim.interval
    if interval is None or 1 / most < interval.low <= interval.high < most:
        return ""
    return ", by a test at either end; the interval is the wider one of both ends together"


def _say_stop(plan: Plan, claim: Claim, pairs: Sequence[Pair]) -> str:
    if len(pairs) == plan.max_pairs or claim.verdict != "INCONCLUSIVE":
        return ""
    return f" {len(pairs)} of the {plan.max_pairs} pairs planned were taken."


def _say_unseen(claim: Claim, pairs: Sequence[Pair]) -> str:
    """Say how rare stalls may be for so few samples of B to miss them in 1 % of comparisons."""
    num_samples = sum(pair.num_windows for pair in pairs if not pair.problem)
    if claim.verdict not in ("FASTER", "SAME") or not 0 < num_samples < FEWEST_SAMPLES:
        return ""
    share = 1 - 0.01 ** (1 / num_samples)
    return f" Stalls in fewer than {100 * share:.0f} % of B's {num_samples} samples may be unseen."


def _say_left_out(plan: Plan, ratio: float, pairs: Sequence[Pair], index: int) -> str:
    """Give the ratio with the pairs left out where they would move it by a tenth of the effect."""
    whole = [(p.a[index], p.b[index]) for p in pairs]
    usable = [(a, b) for a, b in whole if 0 < a < np.inf and 0 < b < np.inf]
    num_left_out = sum(bool(pair.problem) for pair in pairs)
    if not num_left_out or not usable:
        return ""
    a, b = np.array(usable).T
    with_all = float(np.exp(np.median(walsh_averages(np.log(b) - np.log(a)))))
    if abs(with_all / ratio - 1) < plan.smallest_effect / 10:
        return ""
    return f" With the {num_left_out} pairs left out, B over A is {with_all:.4f}, not {ratio:.4f}."
