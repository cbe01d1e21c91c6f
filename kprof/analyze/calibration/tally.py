"""Counting verdicts: thousands of comparisons judged at once by the rule that judges one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kprof.analyze.calibration.result import Judged, Rate, Scenario, pooled
from kprof.analyze.verdict.ranks import Floats
from kprof.analyze.verdict.rule import (
    FixedLook,
    Flags,
    Levels,
    exclusion,
    look_always,
    look_once,
)
from kprof.analyze.verdict.sequence import Course

MOST_AVERAGES = 4_000_000


@dataclass(frozen=True)
class Known:
    """Comparisons whose truth is known, a row each: the log ratios of its pairs in their order."""

    effect: float
    """What was planted, 0 for none."""
    truth: float
    """The log ratio of B to A that it makes."""
    differences: Floats


@dataclass(frozen=True)
class _Outcome:
    """What became of the comparisons of one effect; SAME goes before the others, as in `judge`."""

    effect: float
    is_more: Flags
    is_less: Flags
    is_alike: Flags
    holds_truth: Flags
    is_material: Flags
    """The whole interval lies beyond the smallest effect, on one side or the other."""
    num_pairs: float

    def says(self, flags: Flags) -> Rate:
        """Return how often that was the verdict."""
        return _rate(flags & ~self.is_alike)


def tally(found: Sequence[Known], levels: Levels) -> tuple[Judged, Judged]:
    """Return how verdicts came out with all pairs of the plan, and with stopping early.

    One of those found has to have no effect.
    """
    fixed = [_with_all_pairs(known, levels) for known in found]
    early = [_stopped(known, levels, all_) for known, all_ in zip(found, fixed, strict=True)]
    return _judged(fixed), _judged(early)


def scenario_of(
    name: str, says: str, found: Sequence[Known], levels: Levels, rivals: dict[str, Rate]
) -> Scenario:
    """Return a scenario from what was found in it, each effect once, and none among them."""
    fixed, early = tally(found, levels)
    (none,) = [known.differences for known in found if known.effect == 0]
    return Scenario(name, says, fixed, early, least_found(none, levels), rivals)


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


def _with_all_pairs(known: Known, levels: Levels) -> _Outcome:
    look = look_at_all(known.differences, levels)
    holds_truth = (look.low <= known.truth) & (known.truth <= look.high)
    num_pairs = float(known.differences.shape[1])
    is_more, is_less = look.low > 0, look.high < 0
    is_material = (look.low > levels.margin) | (look.high < -levels.margin)
    is_alike = look.is_alike
    return _Outcome(known.effect, is_more, is_less, is_alike, holds_truth, is_material, num_pairs)


def _stopped(known: Known, levels: Levels, with_all: _Outcome) -> _Outcome:
    course = Course.of(known.differences, levels.max_pairs)
    looks = look_always(course, levels)
    # With the last pair the plan is complete, and its signed ranks are what is reported.
    decided = looks.has_decided[:, :-1]
    is_early = decided.any(axis=1)
    stop = np.where(is_early, decided.argmax(axis=1), decided.shape[1])
    above, below = exclusion(course, levels, known.truth)
    beyond = exclusion(course, levels, levels.margin)[0]
    beyond |= exclusion(course, levels, -levels.margin)[1]

    def there(flags: Flags, otherwise: Flags) -> Flags:
        return np.where(is_early, _at(flags, stop), otherwise)

    return _Outcome(
        known.effect,
        there(looks.is_above, with_all.is_more),
        there(looks.is_below, with_all.is_less),
        there(looks.is_alike, with_all.is_alike),
        there(~(above | below), with_all.holds_truth),
        there(beyond, with_all.is_material),
        float(stop.mean()) + 1,
    )


def _at(flags: Flags, places: npt.NDArray[np.intp]) -> Flags:
    return np.asarray(np.take_along_axis(flags, places[:, None], axis=1)[:, 0])


def _judged(found: Sequence[_Outcome]) -> Judged:
    (none,) = [outcome for outcome in found if outcome.effect == 0]
    some = [outcome for outcome in found if outcome.effect != 0]
    right = [o.is_more if o.effect > 0 else o.is_less for o in some]
    wrong = [o.is_less if o.effect > 0 else o.is_more for o in some]
    return Judged(
        false_positive=_rate(none.is_more | none.is_less),
        false_verdict=none.says(none.is_more | none.is_less),
        same=_rate(none.is_alike),
        power={f"{o.effect:g}": o.says(flags) for o, flags in zip(some, right, strict=True)},
        same_at={f"{o.effect:g}": _rate(o.is_alike) for o in some},
        wrong_direction=pooled([o.says(flags) for o, flags in zip(some, wrong, strict=True)]),
        coverage=pooled([_rate(o.holds_truth) for o in found]),
        pairs={f"{o.effect:g}": o.num_pairs for o in found},
        false_material=_rate(none.is_material),
    )


def _rate(flags: Flags) -> Rate:
    return Rate(int(flags.sum()), int(flags.size))
