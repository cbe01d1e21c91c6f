"""The way from pairs to claims: a verdict for each metric of a plan, with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from statistics import NormalDist

import numpy as np

from kprof.analyze.verdict import ranks
from kprof.analyze.verdict.mean import FEWEST_SAMPLES, MeanLook, look_at_mean
from kprof.analyze.verdict.ranks import Floats, walsh_averages
from kprof.analyze.verdict.refusal import reason_to_refuse, say_inconstant, say_unresolved
from kprof.analyze.verdict.rule import (
    FEWEST_TO_STOP,
    Flags,
    Levels,
    Outcome,
    levels_of,
    look_always,
    look_once,
    outcome_of,
)
from kprof.analyze.verdict.sequence import Course
from kprof.analyze.verdict.sequence import interval as sequence_interval
from kprof.comparison import Claim, Interval, Metric, Pair, Plan, Verdict
from kprof.errors import counted


def judge(
    plan: Plan,
    pairs: Sequence[Pair],
    *,
    are_all: bool = False,
    resolution_ns: float | None = None,
) -> tuple[Claim, ...]:
    """Return a claim for each metric of the plan, in its order.

    With all pairs of the plan in, the interval is that of the signed ranks; with fewer (or more)
    it is the confidence sequence, so that it holds however one came to stop there. All intervals
    of a comparison hold together with `1 - plan.alpha`.

    `are_all` says that there could be no more, for a reason that has nothing to do with what they
    showed: the workload came to its own end. Then they are judged as a plan of so many would be.

    `resolution_ns` is the least difference that the clock of the samples tells apart in a value in
    ns. A clock too coarse for the smallest effect makes a claim inconclusive. None: not known, and
    only ticks that the values show count.
    """
    are_all |= len(pairs) == plan.max_pairs
    pairs = _in_time(pairs)
    claims = [
        _claim(plan, pairs, index, resolution_ns, are_all=are_all)
        for index in range(len(plan.metrics))
    ]
    return _corrected(claims)


def is_enough(plan: Plan, pairs: Sequence[Pair]) -> bool:
    """Tell whether sampling may end: the plan is done, or every metric is decided early.

    A metric with a value that is not a positive number gets no verdict, and does not delay the
    others.
    """
    if len(pairs) >= plan.max_pairs:
        return True
    counting = [pair for pair in _in_time(pairs) if not pair.problem]
    if not plan.stops_early or len(counting) < FEWEST_TO_STOP:
        return False
    indices = range(len(plan.metrics))
    sound = [index for index in indices if _is_sound(_values(counting, index))]
    return bool(sound) and all(_may_stop(plan, counting, index) for index in sound)


def fewest_pairs(plan: Plan) -> int:
    """Return after how many pairs sampling can end, were all of them as clear as can be."""
    if not plan.stops_early:
        return plan.max_pairs
    return min(max(fewest_for_verdict(plan), FEWEST_TO_STOP), plan.max_pairs)


@lru_cache
def fewest_for_verdict(plan: Plan) -> int:
    """Return after how many pairs, all as clear as can be, sampling stopped by hand is decided."""
    clearest = Course.of(np.ones(plan.max_pairs), plan.max_pairs)
    is_settled = look_always(clearest, levels_of(plan)).is_settled
    return int(np.argmax(is_settled)) + 1 if is_settled.any() else plan.max_pairs


def _in_time(pairs: Sequence[Pair]) -> list[Pair]:
    return sorted(pairs, key=lambda pair: pair.start_ns)


def _may_stop(plan: Plan, counting: Sequence[Pair], index: int) -> bool:
    metric, levels = plan.metrics[index], levels_of(plan)
    looks = look_always(Course.of(_differences(_values(counting, index)), plan.max_pairs), levels)
    if not looks.is_settled[-1]:
        return False
    mean = _look_at_mean(counting, index, levels, is_fixed=False)
    ends = np.array([looks.is_above[-1], looks.is_below[-1], looks.is_alike[-1]])
    outcome = _outcome(metric, ends, mean, levels.margin)
    return bool(outcome.may_stop(len(counting), _num_samples(counting), mean, levels.margin))


def _look_at_mean(
    counting: Sequence[Pair], index: int, levels: Levels, *, is_fixed: bool
) -> MeanLook:
    means, num_samples = _means(counting, index), _num_samples(counting)
    return look_at_mean(means, levels.both, levels.margin, num_samples, is_fixed=is_fixed)


def _num_samples(counting: Sequence[Pair]) -> int:
    """Return how many samples of B the pairs hold."""
    return sum(pair.num_windows for pair in counting)


def _outcome(metric: Metric, ends: Flags, mean: MeanLook, margin: float) -> Outcome:
    """Return the verdict from what the pairs show: more, less, alike; and their means."""
    is_more, is_less, is_alike = ends
    if metric.better == "higher":
        is_more, is_less, mean = is_less, is_more, mean.mirrored()
    return outcome_of(is_more, is_less, is_alike, mean, margin)


def _is_sound(values: Floats) -> bool:
    return bool((np.isfinite(values) & (values > 0)).all())


def _values(pairs: Sequence[Pair], index: int) -> Floats:
    """Return a row of A's and a row of B's values of one metric."""
    return np.array([[p.a[index] for p in pairs], [p.b[index] for p in pairs]], dtype=float)


def _means(pairs: Sequence[Pair], index: int) -> Floats:
    """Return the same of the means behind the values, where the values are medians."""
    a = [(pair.mean_a or pair.a)[index] for pair in pairs]
    b = [(pair.mean_b or pair.b)[index] for pair in pairs]
    return np.array([a, b], dtype=float)


def _differences(values: Floats) -> Floats:
    """Return the log ratios; logs first, so that swapping A and B changes nothing but the sign."""
    return np.asarray(np.log(values[1]) - np.log(values[0]))


@dataclass(frozen=True)
class _Decision:
    """The decision from an interval of log ratios."""

    estimate: float
    low: float
    high: float
    is_alike: bool
    p_value: float

    @property
    def is_clear(self) -> bool:
        """Whether the pairs alone would give a verdict."""
        return self.is_alike or not self.low <= 0 <= self.high


def _claim(
    plan: Plan,
    pairs: Sequence[Pair],
    index: int,
    resolution_ns: float | None,
    *,
    are_all: bool,
) -> Claim:
    metric, counting = plan.metrics[index], [pair for pair in pairs if not pair.problem]
    values = _values(counting, index)
    claim = Claim(metric, "INVALID", len(counting))
    if reason := reason_to_refuse(metric, values, pairs, plan.smallest_effect):
        return replace(claim, why=f"{reason}.")
    if reason := say_unresolved(metric, values, plan.smallest_effect, resolution_ns):
        return replace(claim, verdict="INCONCLUSIVE", why=f"{reason}.")
    differences, levels = _differences(values), levels_of(plan)
    decide = _decide_once if are_all else _decide_early
    decision = decide(differences, levels)
    if decision.low > decision.high:
        return replace(claim, why="No one ratio fits: it changed while the pairs were taken.")
    mean = _look_at_mean(counting, index, levels, is_fixed=are_all)
    verdict = _verdict(metric, decision, mean, levels.margin)
    bounded = bool(np.isfinite([decision.low, decision.high]).all())
    claim = replace(
        claim,
        verdict=verdict,
        interval=_interval(decision, levels, are_all) if bounded else None,
        mean=_interval(mean, levels, are_all),
        p_value=decision.p_value,
        is_material=decision.low > levels.margin or decision.high < -levels.margin,
        pairs_needed=pairs_needed(differences, levels)
        if verdict == "INCONCLUSIVE" and not decision.is_clear
        else None,
    )
    ratio = float(np.exp(decision.estimate))
    why = say_why(plan, claim, ratio, pairs, index, decision.is_clear)
    inconstant = say_inconstant(differences, pairs, levels.margin)
    return replace(claim, why=f"{why} {inconstant}.") if inconstant else replace(claim, why=why)


def _decide_once(differences: Floats, levels: Levels) -> _Decision:
    look = look_once(differences, levels)
    p_value = ranks.p_value(ranks.walsh_averages(differences), len(differences))
    return _Decision(
        float(look.estimate),
        float(look.low),
        float(look.high),
        bool(look.is_alike),
        float(p_value) * levels.both / levels.fixed,
    )


def _decide_early(differences: Floats, levels: Levels) -> _Decision:
    course = Course.of(differences, levels.max_pairs)
    low, high = sequence_interval(course, levels.sequence)
    evidence = max(course.evidence_above(0.0)[-1], course.evidence_below(0.0)[-1])
    middle = float(np.median(ranks.walsh_averages(differences)))
    return _Decision(
        # The estimate of the stopped sample leans outwards: never beyond what is certain.
        float(np.clip(middle, low, high)) if low <= high else middle,
        low,
        high,
        bool(look_always(course, levels).is_alike[-1]),
        2 * float(np.exp(-evidence)) * levels.both / levels.sequence,
    )


def _verdict(metric: Metric, decision: _Decision, mean: MeanLook, margin: float) -> Verdict:
    ends = np.array([decision.low > 0, decision.high < 0, decision.is_alike])
    outcome = _outcome(metric, ends, mean, margin)
    if outcome.is_same:
        return "SAME"
    if outcome.is_faster:
        return "FASTER"
    return "SLOWER" if outcome.is_slower else "INCONCLUSIVE"


def _interval(look: _Decision | MeanLook, levels: Levels, are_all: bool) -> Interval:
    ratio, low, high = (float(np.exp(end)) for end in (look.estimate, look.low, look.high))
    return Interval(ratio, low, high, 1 - levels.both, "fixed" if are_all else "sequence")


def _corrected(claims: Sequence[Claim]) -> tuple[Claim, ...]:
    """Correct the p-values by Holm: each may be as small as this only by chance in any of them."""
    known = sorted((c.p_value, i) for i, c in enumerate(claims) if c.p_value is not None)
    corrected, least = list(claims), 0.0
    for place, (p_value, i) in enumerate(known):
        least = max(least, min(1.0, p_value * (len(claims) - place)))
        corrected[i] = replace(claims[i], p_value=least)
    return tuple(corrected)


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
        why = f"{counted(claim.num_pairs, 'pair')}: too few for an interval of this confidence."
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
    return (
        f" With the {counted(num_left_out, 'pair')} left out, B over A is {with_all:.4f}, "
        f"not {ratio:.4f}."
    )
