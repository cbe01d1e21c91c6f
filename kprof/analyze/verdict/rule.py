"""The rule that turns intervals into verdicts, for one comparison or for thousands at once.

An error of `alpha` is shared: the sequence has a part of it for its looks after every pair, the
signed ranks the rest for one look when all pairs of the plan are in. Whichever of the two is then
reported, the chance that it misses the truth is at most the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kprof.analyze.verdict import ranks
from kprof.analyze.verdict.ranks import Floats
from kprof.analyze.verdict.sequence import Course, threshold
from kprof.comparison import Plan

SHARE_OF_SEQUENCE = 0.2
FEWEST_PAIRS = 6
"""With five, no outcome at all would be rare enough."""

MOST_PAIRS, FIXED_PAIRS = 160, 40
"""Of a plan that may stop early, and of one that may not.

Who stops early pays for a long plan with two or three pairs (stakes are smaller), and where pairs
scatter by 2 or 3 % gets the answer that 40 cannot give: benchmarks/sequence_designs.py.
"""

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Levels:
    """What error each look may make on each of the plan's metrics, and what is alike."""

    sequence: float
    fixed: float
    margin: float
    """In log ratio, the same up and down: B at 1.01 of A is as far as A at 1.01 of B."""
    max_pairs: int

    @property
    def both(self) -> float:
        """The error of an interval, whichever look it comes from."""
        return self.sequence + self.fixed


def levels_of(plan: Plan) -> Levels:
    """Return the errors allowed, split evenly over the metrics: all intervals hold together."""
    each = plan.alpha / max(len(plan.metrics), 1)
    return Levels(
        sequence=each * SHARE_OF_SEQUENCE,
        fixed=each * (1 - SHARE_OF_SEQUENCE),
        margin=float(np.log1p(plan.smallest_effect)),
        max_pairs=plan.max_pairs,
    )


@dataclass(frozen=True)
class FixedLook:
    """What the signed ranks say of a number of pairs set beforehand, along the last axis."""

    estimate: Floats
    low: Floats
    high: Floats
    alike_low: Floats
    """Ends of the two one-sided tests: an interval of twice the error."""
    alike_high: Floats
    is_alike: Flags
    """Both of them lie within the margin."""


def look_once(differences: Floats, levels: Levels) -> FixedLook:
    """Judge all pairs of the plan by their signed ranks."""
    num_pairs = differences.shape[-1]
    averages = ranks.walsh_averages(differences)
    low, high = ranks.interval(averages, num_pairs, levels.fixed)
    alike_low, alike_high = ranks.interval(averages, num_pairs, 2 * levels.fixed)
    is_alike = (alike_low > -levels.margin) & (alike_high < levels.margin)
    estimate = np.median(averages, axis=-1)
    return FixedLook(estimate, low, high, alike_low, alike_high, is_alike)


@dataclass(frozen=True)
class Looks:
    """What the sequence has settled after each pair, along the last axis."""

    is_above: Flags
    is_below: Flags
    is_alike: Flags

    @property
    def has_decided(self) -> Flags:
        """Whether one may stop: the interval leaves out 1, or lies within the margin."""
        return np.asarray(self.is_above | self.is_below | self.is_alike)


def look_always(course: Course, levels: Levels) -> Looks:
    """Judge after every pair by the sequence, which is what early stopping rests on."""
    of_0, of_low, of_high = (
        exclusion(course, levels, shift) for shift in (0.0, -levels.margin, levels.margin)
    )
    return Looks(of_0[0], of_0[1], of_low[0] & of_high[1])


def exclusion(course: Course, levels: Levels, shift: float) -> tuple[Flags, Flags]:
    """Tell after each pair whether all shifts up to this one are left out, and all from it."""
    enough = threshold(levels.sequence)
    return course.evidence_above(shift) >= enough, course.evidence_below(shift) >= enough
