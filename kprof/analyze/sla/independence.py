"""The effective sample size of a service's answers.

Slow answers cluster: one slow spell delays many, one start of the service is slower than the next,
and the gaps of one answer are alike. The number of marked (slow, failed) answers then varies more
from block to block, or from run to run, than by chance, so the answers count as fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kprof.analyze.sla.percentiles import CONFIDENCE

Numbers = npt.NDArray[np.float64]

NUM_BLOCKS = (7, 14, 28)
LEAST_IN_BLOCK, LEAST_RUNS_IN_BLOCK = 5, 2
CHANCE_OF_CLUMPS = 0.05
"""Marks that clump more than this by chance are not taken as independent."""
CHANCE_OF_RUNS = 0.5
"""The same of what differs from run to run: few runs show little of it, so less is put to chance.

With 0.05, runs that differ are taken for equal ones so often that "met" is false in up to 7 % with
three runs and 11 % with two; with 0.5 in 2 and 4 %, and runs that are alike count as half on
average.
"""

LEAST_SPELLS = 10
"""A load shorter than so many of the longest spell proves no target met."""

SPELL = "a slow spell may last"
IN_CLUMPS = "slow ones come in clumps"
RUNS_DIFFER = "runs differ"
OF_ONE_ANSWER = "those of one answer belong together"


@dataclass(frozen=True)
class Marks:
    """For each answer of a run, in the order of sending: how many values are marked of how many."""

    marked: Numbers
    sizes: Numbers


class Independent(NamedTuple):
    """As how many independent ones all answers count, and why they are fewer."""

    num: int
    why_fewer: str = ""


class Spells(NamedTuple):
    """How many of the longest slow spell, one after another, a load holds."""

    longest_s: float
    """The assumption: no slow spell of the service lasts longer."""
    load_s: float
    num: int

    @property
    def is_too_short(self) -> bool:
        """Whether the load proves no target met, however fast its answers were."""
        return self.load_s < LEAST_SPELLS * self.longest_s

    def limit(self, independent: Independent) -> Independent:
        """Return as how many independent answers those of the load count at most.

        One spell may have slowed all answers that were due within it, so those count as one.
        """
        if independent.num <= self.num:
            return independent
        return Independent(max(self.num, 1), f"{SPELL} {self.longest_s:g} s")


class _Group(NamedTuple):
    """Neighbours that may have a fate in common."""

    marked: float
    size: float
    squares: float
    """A function of the answers' sizes to which the variance of the marks is proportional."""


def count_independent(runs: Sequence[Marks]) -> Independent:
    """Return as how many independent answers those of all runs count.

    Values of one answer count as one. Where answers have unequally many, as many count as there
    would be of equal ones with the skewness of these: a few long answers may decide. Over groups
    of neighbours (blocks of answers, runs, blocks of runs), the variance of the number of marks
    over that of independent answers divides that number; the greatest counts.
    """
    whole = [_group(run) for run in runs if len(run.sizes)]
    num_values = sum(run.size for run in whole)
    as_answers = _equal_answers(np.concatenate([run.sizes for run in runs]))
    clumping, why = 1.0, OF_ONE_ANSWER if as_answers < num_values else ""
    for groups, chance, reason in _groupings(runs, whole):
        found = _clumping(groups, chance)
        if found > clumping:
            clumping, why = found, reason
    return Independent(max(int(as_answers / clumping), 1), why)


def fewest(counts: Sequence[Independent]) -> Independent:
    """Return the one that counts as the fewest."""
    return min(counts, key=lambda count: count.num)


def count_spells(
    due_ns: npt.NDArray[np.int64], weights: Numbers, load_s: float, longest_s: float
) -> Spells:
    """Count the spells in a load, from when its requests were due and how many samples each has.

    The load is cut at every multiple of the longest spell. Of unequal weights, as many count as
    there would be of equal ones (Kish, Survey Sampling, 1965): an hour of silence adds nothing.
    """
    if not len(due_ns):
        return Spells(longest_s, load_s, 0)
    _, places = np.unique(due_ns // max(round(longest_s * 1e9), 1), return_inverse=True)
    each = np.bincount(places, weights=weights)
    equal = float(each.sum() ** 2 / (each**2).sum()) if each.any() else 0.0
    # Rounding must not cost a spell: 100 s hold ten of 10 s.
    return Spells(longest_s, load_s, int(min(equal, load_s / longest_s) + 1e-6))


def _equal_answers(sizes: Numbers) -> float:
    """Return how many equal answers are as uncertain as these: of sum(m³) / sum(m²) values each."""
    return float(sizes.sum() * (sizes**2).sum() / max((sizes**3).sum(), 1.0))


def _groupings(runs: Sequence[Marks], whole: list[_Group]) -> list[tuple[list[_Group], float, str]]:
    """Return everything that may vary: groups, the chance that is left to them, and the reason."""
    blocks = [[block for run in runs for block in _blocks(run, num)] for num in NUM_BLOCKS]
    several = [
        [_sum_up(whole[part[0] : part[-1] + 1]) for part in np.array_split(range(len(whole)), num)]
        for num in NUM_BLOCKS
        if len(whole) >= num * LEAST_RUNS_IN_BLOCK
    ]
    return [
        *((groups, CHANCE_OF_CLUMPS, IN_CLUMPS) for groups in blocks),
        (whole, CHANCE_OF_RUNS, RUNS_DIFFER),
        *((groups, CHANCE_OF_CLUMPS, RUNS_DIFFER) for groups in several),
    ]


def _clumping(groups: list[_Group], chance: float) -> float:
    """Return by how much marks vary more among groups than independent ones; 1: by chance only.

    It is known as well as the number of groups allows, so Student's quantile takes the place of
    the normal. Groups of unequal size share a variance of their own (DerSimonian and Laird, 1986).
    """
    freedom = len(groups) - 1
    if freedom < 1:
        return 1.0
    marked, sizes, squares = (np.array(column) for column in zip(*groups, strict=True))
    share = marked.sum() / sizes.sum()
    if not 0 < share < 1:
        return 1.0
    variances = share * (1 - share) * squares
    deviation = float(((marked - share * sizes) ** 2 / variances).sum())
    by_chance, how_sure = _chance(freedom, chance)
    if deviation <= by_chance:
        return 1.0
    typical = float((squares**2).sum() / squares.sum())
    excess = max(deviation - freedom, 0.0) * typical / float(squares.sum() - typical)
    return (1 + excess) * how_sure**2


@lru_cache
def _chance(freedom: int, chance: float) -> tuple[float, float]:
    """Return the deviation that chance still explains, and Student's quantile over the normal."""
    from scipy import stats  # Half a second, which `--help` must not wait for.

    by_chance = stats.chi2.ppf(1 - chance, freedom)
    return float(by_chance), float(stats.t.ppf(CONFIDENCE, freedom) / stats.norm.ppf(CONFIDENCE))


def _blocks(run: Marks, num_blocks: int) -> list[_Group]:
    """Return blocks of neighbours; none where a run is too short for so many."""
    if len(run.sizes) < num_blocks * LEAST_IN_BLOCK:
        return []
    parts = zip(
        np.array_split(run.marked, num_blocks), np.array_split(run.sizes, num_blocks), strict=True
    )
    return [_group(Marks(*part)) for part in parts]


def _group(run: Marks) -> _Group:
    return _Group(float(run.marked.sum()), float(run.sizes.sum()), float((run.sizes**2).sum()))


def _sum_up(groups: Sequence[_Group]) -> _Group:
    return _Group(*(sum(column) for column in zip(*groups, strict=True)))
