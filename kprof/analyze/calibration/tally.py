"""Counting verdicts: thousands of comparisons judged at once by the rule that judges one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kprof.analyze.calibration.error_rates import Judged, Rate, Scenario, pooled
from kprof.analyze.verdict.constancy import find_carry_over, find_change, find_waves
from kprof.analyze.verdict.mean import MeanLook, look_at_mean
from kprof.analyze.verdict.ranks import Floats
from kprof.analyze.verdict.rule import (
    FEWEST_TO_STOP,
    FixedLook,
    Flags,
    Levels,
    Looks,
    Outcome,
    exclusion,
    look_always,
    look_once,
    outcome_of,
)
from kprof.analyze.verdict.sequence import Course

MOST_AVERAGES = 4_000_000

Rows = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Known:
    """Comparisons whose truth is known: a row each, their pairs in the order of time."""

    effect: float
    """The planted effect, 0 for none."""
    truth: float
    """The log ratio of B to A that it makes."""
    a: Floats
    """Logs of A's samples."""
    b: Floats
    is_a_first: Flags

    @property
    def differences(self) -> Floats:
        """The log ratios of the pairs."""
        return self.b - self.a

    def mean_at(self, rows: Rows, num_pairs: int, levels: Levels, *, is_fixed: bool) -> MeanLook:
        """Look at the means of so many pairs of some of the comparisons."""
        values = np.stack([np.exp(arm[rows, :num_pairs]) for arm in (self.a, self.b)])
        return look_at_mean(values, levels.both, levels.margin, num_pairs, is_fixed=is_fixed)

    def is_refused_at(self, rows: Rows, num_pairs: int, margin: float) -> Flags:
        """Tell which of these comparisons have no one ratio in so many pairs, as `judge` does."""
        differences = self.differences[rows, :num_pairs]
        is_a_first = self.is_a_first[rows, :num_pairs]
        is_known = np.broadcast_to(np.arange(num_pairs) > 0, is_a_first.shape)
        follows_b = np.roll(is_a_first, 1, axis=-1)
        change = find_change(differences, margin)
        carried = find_carry_over(differences, is_a_first, follows_b, is_known, margin)
        waves = find_waves(differences, margin)
        return change.turns_verdict | waves.turns_verdict | carried.turns_verdict


@dataclass(frozen=True)
class Outcomes:
    """Results of the comparisons of one effect, one of each flag a comparison."""

    effect: float
    is_more: Flags
    """The interval of the pairs leaves out 1 from above."""
    is_less: Flags
    verdict: Outcome
    is_refused: Flags
    holds_truth: Flags
    is_material: Flags
    """The whole interval lies beyond the smallest effect, on one side or the other."""
    stops: Rows
    """How many pairs were taken."""

    @property
    def is_right(self) -> Flags:
        """Whether the direction of the effect was found, by FASTER or SLOWER."""
        return self.verdict.is_slower if self.effect > 0 else self.verdict.is_faster

    @property
    def is_wrong(self) -> Flags:
        """Whether the other direction was found."""
        return self.verdict.is_faster if self.effect > 0 else self.verdict.is_slower


def tally(found: Sequence[Known], levels: Levels) -> tuple[Judged, Judged]:
    """Return how verdicts came out with all pairs of the plan, and with stopping early.

    One of those found has to have no effect.
    """
    fixed = [with_all_pairs(known, levels) for known in found]
    early = [when_stopped(known, levels, all_) for known, all_ in zip(found, fixed, strict=True)]
    return _judged(fixed), _judged(early)


def scenario_of(name: str, says: str, found: Sequence[Known], levels: Levels) -> Scenario:
    """Return a scenario from what was found in it, each effect once, and none among them."""
    fixed, early = tally(found, levels)
    (none,) = [known.differences for known in found if known.effect == 0]
    return Scenario(name, says, fixed, early, least_found(none, levels))


def least_found(differences: Floats, levels: Levels) -> float:
    """Return the least difference that four in five of these would find, were it there.

    All pairs moved by as much move the interval by as much: where A and B are alike, the interval
    reaches down as far as a difference has to lift it.
    """
    reach = -look_at_all(differences, levels).low
    return float(np.expm1(np.quantile(reach, 0.8)))


def look_at_all(differences: Floats, levels: Levels) -> FixedLook:
    """Judge all comparisons with all their pairs, some at a time: each has many averages."""
    num_comparisons, num_pairs = differences.shape
    num_blocks = 1 + num_comparisons * num_pairs * (num_pairs + 1) // 2 // MOST_AVERAGES
    looks = [look_once(block, levels) for block in np.array_split(differences, num_blocks)]
    parts = zip(*(vars(look).values() for look in looks), strict=True)
    return FixedLook(*(np.concatenate(part) for part in parts))


def _in_blocks(num_comparisons: int, num_pairs: int) -> list[Rows]:
    """Return the rows, some at a time: each comparison has many pairs of pairs."""
    num_blocks = 1 + num_comparisons * num_pairs**2 // (2 * MOST_AVERAGES)
    return np.array_split(np.arange(num_comparisons), num_blocks)


def with_all_pairs(known: Known, levels: Levels) -> Outcomes:
    """Return the outcomes of a plan that takes all its pairs."""
    look = look_at_all(known.differences, levels)
    num_comparisons, num_pairs = known.a.shape
    is_more, is_less = look.low > 0, look.high < 0
    rows = np.arange(num_comparisons)
    mean = known.mean_at(rows, num_pairs, levels, is_fixed=True)
    outcome = outcome_of(is_more, is_less, look.is_alike, mean, levels.margin)
    is_refused = [
        known.is_refused_at(block, num_pairs, levels.margin)
        for block in _in_blocks(num_comparisons, num_pairs)
    ]
    return Outcomes(
        known.effect,
        is_more,
        is_less,
        outcome.where(~np.concatenate(is_refused)),
        np.concatenate(is_refused),
        (look.low <= known.truth) & (known.truth <= look.high),
        (look.low > levels.margin) | (look.high < -levels.margin),
        np.full(num_comparisons, num_pairs),
    )


def stops_of(known: Known, levels: Levels) -> npt.NDArray[np.intp]:
    """Return after how many pairs each comparison would have been stopped, as by `is_enough`."""
    num_comparisons, num_pairs = known.a.shape
    looks = look_always(Course.of(known.differences, levels.max_pairs), levels)
    stops = np.full(num_comparisons, num_pairs)
    for taken in range(FEWEST_TO_STOP, num_pairs):
        rows = np.flatnonzero((stops == num_pairs) & looks.is_settled[:, taken - 1])
        if len(rows):
            mean = known.mean_at(rows, taken, levels, is_fixed=False)
            outcome = _outcome_at(looks, rows, taken, mean, levels)
            may_stop = outcome.may_stop(taken, taken, mean, levels.margin)
            stops[rows[may_stop]] = taken
    return stops


def when_stopped(known: Known, levels: Levels, with_all: Outcomes) -> Outcomes:
    """Return the outcomes where each stops as early as it may.

    With the last pair the plan is complete, and its signed ranks are what is reported.
    """
    course = Course.of(known.differences, levels.max_pairs)
    looks, stops = look_always(course, levels), stops_of(known, levels)
    above, below = exclusion(course, levels, known.truth)
    is_early = stops < known.a.shape[1]

    def there(flags: Flags, otherwise: Flags) -> Flags:
        return np.where(is_early, _at(flags, stops - 1), otherwise)

    of_all = with_all.verdict
    verdict = [of_all.is_faster.copy(), of_all.is_slower.copy(), of_all.is_same.copy()]
    is_refused = with_all.is_refused.copy()
    for taken in np.unique(stops[is_early]):
        rows = np.flatnonzero(stops == taken)
        mean = known.mean_at(rows, taken, levels, is_fixed=False)
        is_refused[rows] = known.is_refused_at(rows, taken, levels.margin)
        found = _outcome_at(looks, rows, taken, mean, levels).where(~is_refused[rows])
        for before, now in zip(
            verdict, (found.is_faster, found.is_slower, found.is_same), strict=True
        ):
            before[rows] = now
    return Outcomes(
        known.effect,
        there(looks.is_above, with_all.is_more),
        there(looks.is_below, with_all.is_less),
        Outcome(*verdict),
        is_refused,
        there(~(above | below), with_all.holds_truth),
        there(looks.is_beyond, with_all.is_material),
        stops,
    )


def _outcome_at(
    looks: Looks, rows: Rows, num_pairs: int, mean: MeanLook, levels: Levels
) -> Outcome:
    is_above, is_below, is_alike = (
        flags[rows, num_pairs - 1] for flags in (looks.is_above, looks.is_below, looks.is_alike)
    )
    return outcome_of(is_above, is_below, is_alike, mean, levels.margin)


def _at(flags: Flags, places: npt.NDArray[np.intp]) -> Flags:
    return np.asarray(np.take_along_axis(flags, places[:, None], axis=1)[:, 0])


def _judged(found: Sequence[Outcomes]) -> Judged:
    (none,) = [outcome for outcome in found if outcome.effect == 0]
    some = [outcome for outcome in found if outcome.effect != 0]
    return Judged(
        false_positive=_rate(none.is_more | none.is_less),
        false_verdict=_rate(none.verdict.is_faster | none.verdict.is_slower),
        same=_rate(none.verdict.is_same),
        power={f"{o.effect:g}": _rate(o.is_right) for o in some},
        same_at={f"{o.effect:g}": _rate(o.verdict.is_same) for o in some},
        wrong_direction=pooled([_rate(o.is_wrong) for o in some]),
        coverage=pooled([_rate(o.holds_truth) for o in found]),
        pairs={f"{o.effect:g}": float(o.stops.mean()) for o in found},
        false_material=_rate(none.is_material),
        refused=pooled([_rate(o.is_refused) for o in found]),
    )


def _rate(flags: Flags) -> Rate:
    return Rate(int(flags.sum()), int(flags.size))
