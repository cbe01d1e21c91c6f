"""All ranks of two runs side by side, in detail or not: the time of each, and who comes late.

Sums of a rank are divided by its marked steps, or are of its window where none is marked. A time
counts as unchanged where it differs by no more than the tolerance, as a share of the longer step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kprof.analyze.condense import rank_totals
from kprof.analyze.diff.alignment import UNCHANGED, Fate
from kprof.analyze.late_ranks import Lateness, find_lateness
from kprof.trace import RankTotals, Trace

Measure = Literal["step", "busy", "exposed_communication", "idle", "late", "waits"]
OF_TOTALS: dict[Measure, Callable[[RankTotals], int]] = {
    "step": lambda one: one.steps_ns if one.num_steps else one.window_ns,
    "busy": lambda one: one.busy_ns,
    "exposed_communication": lambda one: one.exposed_communication_ns,
    "idle": lambda one: one.idle_ns,
}
OF_LATENESS: tuple[Measure, ...] = ("late", "waits")
MEASURES: tuple[Measure, ...] = (*OF_TOTALS, *OF_LATENESS)


@dataclass(frozen=True)
class Times:
    """One time in both runs, in ns; None where a run has no such rank, or does not tell."""

    a_ns: float | None
    b_ns: float | None
    fate: Fate | None
    """None where a run does not tell."""

    @property
    def difference_ns(self) -> float | None:
        """How much longer it is in the second run."""
        return None if self.a_ns is None or self.b_ns is None else self.b_ns - self.a_ns


@dataclass(frozen=True)
class RankRow:
    """One rank in both runs."""

    rank: int | None
    """None: the mean of all ranks."""
    times: dict[Measure, Times]


@dataclass(frozen=True)
class RankDifference:
    """All ranks of the second run against those of the first."""

    mean: RankRow
    ranks: tuple[RankRow, ...]
    """Those of which a time differs most come first."""
    late_a: tuple[int, ...] | None
    """Ranks that the others wait for in the first run; None where that is unknown."""
    late_b: tuple[int, ...] | None

    @property
    def late_since(self) -> tuple[int, ...] | None:
        """Ranks that are late in the second run alone."""
        return _less(self.late_b, self.late_a)

    @property
    def in_time_since(self) -> tuple[int, ...] | None:
        """Ranks that were late in the first run alone."""
        return _less(self.late_a, self.late_b)


def compare_ranks(a: Trace, b: Trace) -> RankDifference | None:
    """Lay the ranks of two analyzed traces side by side; None where both have one, or no timeline.

    A positive difference is time that `b` takes more.
    """
    if not (a.has_timeline and b.has_timeline):
        return None
    if max(a.meta.num_all_ranks, b.meta.num_all_ranks) < 2:
        return None
    sides = _times_by_rank(a), _times_by_rank(b)
    rows = [
        RankRow(rank, _times(sides[0].get(rank), sides[1].get(rank)))
        for rank in sorted(sides[0].keys() | sides[1].keys())
    ]
    means = [_mean(list(side.values())) for side in sides]
    lateness = find_lateness(a), find_lateness(b)
    late_a, late_b = (None if one is None else one.stragglers for one in lateness)
    return RankDifference(
        mean=RankRow(None, _times(*means)),
        ranks=tuple(sorted(rows, key=lambda row: -_most_ns(row))),
        late_a=late_a,
        late_b=late_b,
    )


Side = dict[Measure, float | None]


def _times_by_rank(trace: Trace) -> dict[int, Side]:
    """Return the times of each rank in a step, or in the window."""
    found = find_lateness(trace)
    late = {one.rank: one for one in found.ranks} if found else {}
    sides = {}
    for one in rank_totals(trace):
        num_steps = max(one.num_steps, 1)
        side: Side = {name: of(one) / num_steps for name, of in OF_TOTALS.items()}
        side |= dict.fromkeys(OF_LATENESS)
        kept_up = late.get(one.rank)
        if kept_up is not None and found is not None:
            per_step = _units_of_a_step(found, num_steps)
            side["late"] = max(kept_up.late_ns, 0.0) * per_step
            side["waits"] = kept_up.waits_ns * per_step
        sides[one.rank] = side
    return sides


def _units_of_a_step(found: Lateness, num_steps: int) -> float:
    return 1.0 if found.are_steps else found.num_units / num_steps


def _mean(sides: list[Side]) -> Side:
    """Return the mean of the ranks; of lateness where all ranks tell it."""
    found: Side = {}
    for measure in MEASURES:
        known = [time for side in sides if (time := side[measure]) is not None]
        found[measure] = sum(known) / len(known) if len(known) == len(sides) else None
    return found


def _times(a: Side | None, b: Side | None) -> dict[Measure, Times]:
    """Return the times of one rank in both runs; None for a run without it."""
    steps = [side["step"] or 0.0 for side in (a, b) if side is not None]
    tolerance_ns = UNCHANGED * max(steps)
    found = {}
    for measure in MEASURES:
        in_a, in_b = (None if side is None else side[measure] for side in (a, b))
        fate: Fate | None = None
        if a is None:
            fate = None if in_b is None else "appeared"
        elif b is None:
            fate = None if in_a is None else "vanished"
        elif in_a is not None and in_b is not None:
            is_near = abs(in_b - in_a) <= tolerance_ns
            fate = "same" if in_a == in_b else "unchanged" if is_near else "changed"
        found[measure] = Times(in_a, in_b, fate)
    return found


def _most_ns(row: RankRow) -> float:
    return max(abs(one.difference_ns or 0.0) for one in row.times.values())


def _less(these: tuple[int, ...] | None, those: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if these is None or those is None:
        return None
    return tuple(sorted({*these} - {*those}))
