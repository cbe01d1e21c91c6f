"""From pairs to claims: the verdict on each metric of a plan, and when there are enough pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kprof.analyze.verdict import ranks
from kprof.analyze.verdict.outlook import pairs_needed
from kprof.analyze.verdict.ranks import Floats
from kprof.analyze.verdict.refusal import reason_to_refuse
from kprof.analyze.verdict.rule import (
    FEWEST_PAIRS,
    Levels,
    levels_of,
    look_always,
    look_once,
)
from kprof.analyze.verdict.sequence import Course
from kprof.analyze.verdict.sequence import interval as sequence_interval
from kprof.analyze.verdict.wording import say_why
from kprof.comparison import Claim, Interval, Metric, Pair, Plan, Verdict


def judge(plan: Plan, pairs: Sequence[Pair], *, are_all: bool = False) -> tuple[Claim, ...]:
    """Return a claim for each metric of the plan, in its order.

    With all pairs of the plan in, the interval is that of the signed ranks; with fewer (or more)
    it is the confidence sequence, so that it holds however one came to stop there. All intervals
    of a comparison hold together with `1 - plan.alpha`.

    `are_all` says that there could be no more, for a reason that has nothing to do with what they
    showed: the workload came to its own end. Then they are judged as a plan of so many would be.
    """
    are_all |= len(pairs) == plan.max_pairs
    claims = [_claim(plan, pairs, index, are_all=are_all) for index in range(len(plan.metrics))]
    return _corrected(claims)


def is_enough(plan: Plan, pairs: Sequence[Pair]) -> bool:
    """Tell whether sampling may end: the plan is done, or every metric is decided early.

    One with a value that is none gets no verdict any more, and nobody waits for it.
    """
    if len(pairs) >= plan.max_pairs:
        return True
    counting = [pair for pair in pairs if not pair.problem]
    if not plan.stops_early or len(counting) < FEWEST_PAIRS:
        return False
    levels = levels_of(plan)
    every = [_values(counting, index) for index in range(len(plan.metrics))]
    sound = [values for values in every if (np.isfinite(values) & (values > 0)).all()]
    courses = [Course.of(_differences(values), plan.max_pairs) for values in sound]
    decided = [look_always(course, levels).has_decided[-1] for course in courses]
    return bool(decided) and all(decided)


def _values(pairs: Sequence[Pair], index: int) -> Floats:
    """Return a row of A's and a row of B's values of one metric."""
    return np.array([[p.a[index] for p in pairs], [p.b[index] for p in pairs]], dtype=float)


def _differences(values: Floats) -> Floats:
    """Return the log ratios; logs first, so that swapping A and B changes nothing but the sign."""
    return np.asarray(np.log(values[1]) - np.log(values[0]))


@dataclass(frozen=True)
class _Decision:
    """What an interval of log ratios decides."""

    estimate: float
    low: float
    high: float
    is_alike: bool
    p_value: float


def _claim(plan: Plan, pairs: Sequence[Pair], index: int, *, are_all: bool) -> Claim:
    metric, counting = plan.metrics[index], [pair for pair in pairs if not pair.problem]
    values = _values(counting, index)
    claim = Claim(metric, "INVALID", len(counting))
    if reason := reason_to_refuse(metric, values, pairs, plan.smallest_effect):
        return replace(claim, why=f"{reason}.")
    differences, levels = _differences(values), levels_of(plan)
    decide = _decide_once if are_all else _decide_early
    decision = decide(differences, levels)
    if decision.low > decision.high:
        return replace(claim, why="No one ratio fits: it changed while the pairs were taken.")
    verdict = _verdict(metric, decision)
    bounded = bool(np.isfinite([decision.low, decision.high]).all())
    claim = replace(
        claim,
        verdict=verdict,
        interval=_interval(decision, levels, are_all) if bounded else None,
        p_value=decision.p_value,
        is_material=decision.low > levels.margin or decision.high < -levels.margin,
        pairs_needed=pairs_needed(differences, levels) if verdict == "INCONCLUSIVE" else None,
    )
    return replace(claim, why=say_why(plan, claim, float(np.exp(decision.estimate)), pairs, index))


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


def _verdict(metric: Metric, decision: _Decision) -> Verdict:
    if decision.is_alike:
        return "SAME"
    if decision.low <= 0 <= decision.high:
        return "INCONCLUSIVE"
    is_more = decision.low > 0
    return "FASTER" if is_more == (metric.better == "higher") else "SLOWER"


def _interval(decision: _Decision, levels: Levels, are_all: bool) -> Interval:
    ratio, low, high = np.exp([decision.estimate, decision.low, decision.high])
    kind = "fixed" if are_all else "sequence"
    return Interval(float(ratio), float(low), float(high), 1 - levels.both, kind)  # type: ignore[arg-type]


def _corrected(claims: Sequence[Claim]) -> tuple[Claim, ...]:
    """Correct the p-values by Holm: each may be as small as this only by chance in any of them."""
    known = sorted((c.p_value, i) for i, c in enumerate(claims) if c.p_value is not None)
    corrected, least = list(claims), 0.0
    for place, (p_value, i) in enumerate(known):
        least = max(least, min(1.0, p_value * (len(claims) - place)))
        corrected[i] = replace(claims[i], p_value=least)
    return tuple(corrected)
