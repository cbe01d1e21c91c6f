"""Why pairs can carry no verdict: each way in which an honest interval would still mislead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb

import numpy as np

from kprof.analyze.verdict.constancy import find_carry_over, find_change, find_waves
from kprof.analyze.verdict.ranks import Floats
from kprof.analyze.verdict.rule import FEWEST_PAIRS
from kprof.comparison import Metric, Pair
from kprof.errors import counted

MOST_LEFT_OUT = 0.2
# A fair coin falls as unevenly as this in one run out of ten thousand.
LEAST_CHANCE_OF_ORDER = 1e-4
# A tick of the clock up to this share of the smallest effect cannot turn a verdict.
HARMLESS_TICK = 0.2
# A tick beyond this share of the smallest effect turns verdicts, however pairs scatter.
MOST_TICK = 0.5
# Values this many smallest effects away from the median say nothing of the clock's ticks.
WIDEST_SPREAD = 20.0
# Trial frequencies per multiple of a tick over the width of the values.
OVERSAMPLED = 8
# The resultant of the values' phases at a tick, 1 where all are multiples of it: that of a normal
# jitter of 0.19 ticks, in each variant. Its square times the values is the evidence, summed over
# both: a smooth distribution exceeds this in 2 of a million ticks.
LEAST_RESULTANT, LEAST_EVIDENCE = 0.5, 16.0
# A multiple with more values than this share may be a narrow peak rather than a tick.
MOST_IN_ONE_TICK = 0.75
# Two multiples are a tick where the values lie this close to them, each has this share of them, and
# both variants go from one to the other so often: drift and stalls do not.
CLEAN_RESULTANT, LEAST_IN_ONE_TICK, FEWEST_SWITCHES = 0.9, 0.15, 4
COUNTED_UNITS = {"B", "KiB", "MiB", "GiB", "bytes", "tokens", "count", ""}
"""A count, unlike a time, may well be the same in every sample."""


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
    if reason := _reason_in_ticks(metric, values, smallest_effect):
        return reason
    differences = np.log(values[1]) - np.log(values[0])
    return say_inconstant(differences, pairs, float(np.log1p(smallest_effect)), turns_verdict=True)


def _reason_in_pairs(pairs: Sequence[Pair], counting: Sequence[Pair]) -> str:
    num_left_out = len(pairs) - len(counting)
    causes = Counter(pair.problem for pair in pairs if pair.problem)
    why = "; ".join(f"{cause}: {number}" for cause, number in causes.most_common(3))
    if len(counting) < FEWEST_PAIRS:
        left_out = f", {num_left_out} left out ({why})" if num_left_out else ""
        return f"{counted(len(counting), 'valid pair')} of at least {FEWEST_PAIRS}{left_out}"
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


def say_inconstant(
    differences: Floats, pairs: Sequence[Pair], margin: float, *, turns_verdict: bool = False
) -> str:
    """Say how the ratio changed while the pairs were taken, or depended on what ran before.

    `pairs` are in the order of time, and `differences` are of those that count.
    With `turns_verdict`, only of a change that makes the verdict another one.
    """
    counts = np.array([not pair.problem for pair in pairs])
    change = find_change(differences, margin)
    if change.turns_verdict if turns_verdict else change.is_found:
        split = int(change.num_before)
        before, after = (
            float(np.median(part)) for part in (differences[:split], differences[split:])
        )
        return (
            f"B over A was {np.exp(before):.4f} in the first {split} pairs and "
            f"{np.exp(after):.4f} in the {len(differences) - split} after them: it changes with "
            "time, as by a late warm-up"
        )
    waves = find_waves(differences, margin)
    if waves.turns_verdict if turns_verdict else waves.is_found:
        return (
            f"B over A goes up and down from {np.exp(waves.lowest):.4f} to "
            f"{np.exp(waves.highest):.4f}, and neighbouring pairs are alike: B changes between "
            "states that last longer than a pair, so take longer samples"
        )
    is_a_first = np.array([pair.is_a_first for pair in pairs])
    # The second sample of a pair is B's where A came first.
    follows_b, is_known = np.roll(is_a_first, 1), np.arange(len(pairs)) > 0
    carried = find_carry_over(
        differences, is_a_first[counts], follows_b[counts], is_known[counts], margin
    )
    if carried.turns_verdict if turns_verdict else carried.is_found:
        percent = 100 * float(np.expm1(carried.size))
        return (
            f"A sample after B takes {abs(percent):.2g} % {'more' if percent > 0 else 'less'} than "
            "the same after A: B leaves behind what changes the next sample, so take longer "
            "samples, or compare in alternating processes"
        )
    return ""


def _reason_in_ticks(metric: Metric, values: Floats, smallest_effect: float) -> str:
    """Say when the values show the steps of their clock rather than the workload.

    Rounding evens out where the pairs scatter over several ticks. Where half of them lie within
    one, the middle of all is where the tick is, not where the truth is. It goes in half ticks
    however they scatter, so that a tick of more than half of the effect is too coarse anyway.
    """
    if metric.unit in COUNTED_UNITS:
        return ""
    middle = float(np.median(values))
    effect = smallest_effect * middle
    distinct = np.unique(values)
    if len(distinct) == 1:
        return f"every value is {middle:g} {metric.unit}"
    apart = values[1] - values[0]
    exact = float(np.diff(distinct).min()), 2 * len(distinct) <= values.size
    for tick, is_repeated in (exact, (tick_below_jitter(values, effect), True)):
        near = np.abs(apart - np.median(apart)) < tick / 2
        is_coarse = tick > HARMLESS_TICK * effect and near.mean() > 0.5
        is_coarse |= tick > MOST_TICK * effect and is_repeated
        if is_coarse:
            return (
                f"the values go in steps of {tick:.3g} {metric.unit}, {100 * tick / middle:.2g} % "
                "of their size: too coarse for the effect that is sought, so time more calls in "
                "one sample"
            )
    return ""


def say_unresolved(
    metric: Metric, values: Floats, smallest_effect: float, resolution_ns: float | None
) -> str:
    """Say that the clock of the samples cannot tell the smallest effect apart; empty: it can.

    Where noise is far below a tick, all readings lie at one multiple, as those of two exact
    durations do: only the clock itself tells the two cases apart.
    """
    if resolution_ns is None or metric.unit != "ns":
        return ""
    middle = float(np.median(values))
    if resolution_ns <= MOST_TICK * smallest_effect * middle:
        return ""
    return (
        f"the clock tells {resolution_ns:.3g} ns apart, {100 * resolution_ns / middle:.2g} % of a "
        f"value: too coarse for the {100 * smallest_effect:g} % that matters, so time more calls "
        "in one sample"
    )


def tick_below_jitter(values: Floats, effect: float) -> float:
    """Return the widest tick around whose multiples A's and B's values lie; 0: there is none.

    At a tick the phases of the values agree. So do those of any values at a tick wider than their
    spread, hence it takes three neighbouring multiples in each variant, or two between which both
    variants go to and fro.
    """
    arms = [arm[np.abs(arm - np.median(arm)) <= WIDEST_SPREAD * effect] for arm in values]
    if not all(arm.size for arm in arms):
        # The median lies between two groups of values that are far apart.
        return 0.0
    width = max(float(np.ptp(arm)) for arm in arms)
    narrowest = HARMLESS_TICK * effect
    if width <= 2 * narrowest:
        return 0.0
    trials = np.arange(OVERSAMPLED // 2, int(OVERSAMPLED * width / narrowest) + 1)
    frequencies = trials / (OVERSAMPLED * width)
    phases = [np.exp(2j * np.pi * np.outer(frequencies, arm)).mean(axis=1) for arm in arms]
    evidence = sum(arm.size * np.abs(phase) ** 2 for arm, phase in zip(arms, phases, strict=True))
    agree = np.min(np.abs(phases), axis=0) >= LEAST_RESULTANT
    for trial in np.flatnonzero(agree & (evidence >= LEAST_EVIDENCE)):
        tick = 1 / float(frequencies[trial])
        starts = [float(np.angle(phase[trial])) / (2 * np.pi) for phase in phases]
        in_ticks = [arm / tick - at for arm, at in zip(arms, starts, strict=True)]
        is_clean = abs(sum(phase[trial] for phase in phases)) / 2 >= CLEAN_RESULTANT
        is_shared = is_clean and tick > effect
        if all(_are_neighbours(of) or (is_shared and _is_mixed(of)) for of in in_ticks):
            return tick
    return 0.0


def _are_neighbours(in_ticks: Floats) -> bool:
    """Tell whether the values lie at three multiples or more that follow one another.

    The values apart from the most frequent multiple have to agree as well: a narrow peak with wide
    tails has none at the multiples beside it.
    """
    multiples = np.round(in_ticks)
    places, counts = np.unique(multiples, return_counts=True)
    often = places[counts >= 2]
    if counts.max() > MOST_IN_ONE_TICK * multiples.size or len(often) < 3:
        return False
    others = in_ticks[multiples != places[counts.argmax()]]
    agreement = float(np.cos(2 * np.pi * others).mean())
    return agreement >= LEAST_RESULTANT and len(often) == 1 + int(np.ptp(often))


def _is_mixed(in_ticks: Floats) -> bool:
    """Tell whether the values lie at two neighbouring multiples and go to and fro in time."""
    multiples = np.round(in_ticks)
    places, counts = np.unique(multiples, return_counts=True)
    return bool(
        len(places) == 2
        and np.ptp(places) == 1
        and counts.min() >= LEAST_IN_ONE_TICK * multiples.size
        and np.count_nonzero(np.diff(multiples)) >= FEWEST_SWITCHES
    )
