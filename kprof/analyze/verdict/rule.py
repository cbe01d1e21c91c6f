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
from kprof.analyze.verdict.mean import FEWEST_SAMPLES, MeanLook
from kprof.analyze.verdict.ranks import Floats
from kprof.analyze.verdict.sequence import Course, threshold
from kprof.comparison import Plan

SHARE_OF_SEQUENCE = 0.2
FEWEST_PAIRS = 6
"""With five, no outcome at all would be rare enough."""

FEWEST_TO_STOP = 24
"""Sampling does not stop early before so many pairs: with fewer, a ratio that changes in time and
carry-over cannot be told from noise."""

MOST_PAIRS, FIXED_PAIRS = 160, 40
"""Maximum pairs of a plan that may stop early, and of one that may not.

Early stopping needs two or three pairs more in a long plan (stakes are smaller), and where pairs
scatter by 2 or 3 % it decides when 40 pairs cannot: benchmarks/sequence_designs.py.
"""

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Levels:
    """The error that each look may make on each of the plan's metrics, and shared settings."""

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
    """The signed-rank result for a number of pairs set beforehand, along the last axis."""

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
    """The decision of the sequence after each pair, along the last axis."""

    is_above: Flags
    is_below: Flags
    is_alike: Flags
    is_beyond: Flags
    """The whole interval lies beyond the margin, on one side or the other."""

    @property
    def is_settled(self) -> Flags:
        """Whether more pairs can only confirm it: alike, or different by what matters.

        A difference that may or may not matter is worth more pairs.
        """
        return np.asarray(self.is_alike | self.is_beyond)


def look_always(course: Course, levels: Levels) -> Looks:
    """Judge after every pair by the sequence, which is what early stopping rests on."""
    of_0, of_low, of_high = (
        exclusion(course, levels, shift) for shift in (0.0, -levels.margin, levels.margin)
    )
    return Looks(of_0[0], of_0[1], of_low[0] & of_high[1], of_high[0] | of_low[1])


def exclusion(course: Course, levels: Levels, shift: float) -> tuple[Flags, Flags]:
    """Tell after each pair whether all shifts up to this one are left out, and all from it."""
    enough = threshold(levels.sequence)
    return course.evidence_above(shift) >= enough, course.evidence_below(shift) >= enough


@dataclass(frozen=True)
class Outcome:
    """The verdict as flags, where less is better; none of them: inconclusive."""

    is_faster: Flags
    is_slower: Flags
    is_same: Flags

    def where(self, counts: Flags) -> Outcome:
        """Return the verdicts of those that count, and none of the others."""
        return Outcome(self.is_faster & counts, self.is_slower & counts, self.is_same & counts)

    def may_stop(self, num_pairs: int, num_samples: int, mean: MeanLook, margin: float) -> Flags:
        """Tell whether so many pairs, and samples of B, are enough to stop early with it.

        FASTER and SAME let B replace A, so they take the samples that rare stalls show in. While
        the mean is beyond the margin, more pairs show whether it stays there.
        """
        is_same = self.is_same & (np.abs(mean.estimate) <= margin)
        found = self.is_slower | ((self.is_faster | is_same) & (num_samples >= FEWEST_SAMPLES))
        return np.asarray(found & (num_pairs >= FEWEST_TO_STOP))


def outcome_of(
    is_more: Flags, is_less: Flags, is_alike: Flags, mean: MeanLook, margin: float
) -> Outcome:
    """Return the verdict by the pairs and by the mean; where less is better.

    FASTER needs a mean that is lower, and proven to be no slower by what matters. SLOWER needs one
    that is not faster, SAME one that is not slower by what matters: neither may be contradicted.
    """
    return Outcome(
        is_faster=is_less & ~is_alike & mean.is_no_more & (mean.estimate < 0),
        is_slower=is_more & ~is_alike & ~(mean.high < 0),
        is_same=is_alike & ~((mean.low > 0) & (mean.estimate > margin)),
    )
