"""Offsets between the clocks of several recordings, from the collectives that they share.

A collective to which every rank contributes cannot end on any rank before it has begun on all of
them: each one that two recordings share bounds the offset between their clocks from both sides.
It also ends everywhere at almost the same moment, so that its ends tell the offset itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kprof.collect.collectives import Pair, Run, by_number, by_order, runs_of
from kprof.errors import counted
from kprof.trace import Caveat, Trace

# Clocks that contradict the collectives by no more than this are left alone: every process
# converts its GPU's timestamps to the host's clock for itself.
TOLERANCE_NS = 50_000

# How far apart a collective may end on two ranks, and one part in so many of its duration more.
# On two ranks of one host, gathers of 1 GB ended 0.3 to 0.8 % of their 42 to 62 ms apart.
END_SKEW_NS = 20_000
END_SKEW_PART = 100

# Activities this many times further apart do not end together.
FAR_APART = 3

# No two clocks are compared better than their timestamps are.
RESOLUTION_NS = 1_000

# One in so many collectives may contradict the rest.
ONE_IN = 20

# Fewer show no spread, and fit together by chance.
FEWEST_TO_TELL = 8

# Fewer do not show a drift; and it must exceed the scatter by so many times.
FEWEST_TO_DRIFT = 24
CLEAR_OF_SCATTER = 4
# Faster changes are not drift: NTP adjusts a clock by at most one part in this many.
FASTEST_DRIFT = 2_000


class Mismatch(Enum):
    """Why collectives tell nothing of two clocks."""

    UNCLEAR = "fit together in several ways, or are too few"
    CONTRADICTORY = "cannot be matched without contradiction"


@dataclass(frozen=True)
class Offset:
    """The offset that makes a second clock read as the first."""

    offset_ns: int
    uncertainty_ns: int
    contradiction_ns: int
    """By how much the clocks, left alone, contradict that a collective ends on no rank before it
    has begun on all, or that it ends on all together."""
    drift_ns: int
    """How much the offset changes while they are recorded; 0 where no change is clear."""
    number: int
    """Number of collectives that were compared."""
    spread_ns: int
    """How far apart, but for a tenth of them, they end on clocks put right by the offset."""
    skew_ns: int
    """How far apart collectives of their durations may end."""


# More recordings than this are not named one by one.
NAMED = 4


@dataclass(frozen=True)
class Alignment:
    """By how much to move the clock of each recording, and what to say about it."""

    shifts_ns: tuple[int, ...]
    is_checked: tuple[bool, ...]
    """Whether collectives tell where the clock of each recording stands."""
    within_ns: int
    """How far the worst of those may still be from the reference's clock."""
    summary: str
    doubts: tuple[Caveat, ...] = ()
    """Sentences of the summary that are caveats."""
    grade: Literal["good", "limited"] | None = None
    """Limited with doubts, else good where any two clocks were checked; None: none was."""


@dataclass(frozen=True)
class _Place:
    """Where a clock stands: what to add to it, and within how much it then reads as the first."""

    shift_ns: int
    within_ns: int
    number: int


def align(traces: Sequence[Trace], reference: int = 0) -> Alignment:
    """Check the clocks of recordings by their collectives, and say which to move by how much.

    Clocks that violate nothing are left alone: the ranks of one host share theirs. The clock of
    the recording number `reference` stands, and one that shares no process group with it is
    reached through others.
    """
    names = [_name(trace) for trace in traces]
    runs = [runs_of(trace) for trace in traces]
    places = {reference: _Place(0, 0, 0)}
    refusals: dict[int, tuple[str, Mismatch]] = {}
    drifts: list[str] = []
    queue = deque([reference])
    while queue:
        known = queue.popleft()
        for other in range(len(traces)):
            if other in places or not runs[known].keys() & runs[other].keys():
                continue
            both = f"{names[known]} and {names[other]}"
            offset = compare(runs[known], runs[other])
            if isinstance(offset, Mismatch):
                refusals[other] = (both, offset)
                continue
            places[other] = _placed(places[known], offset)
            queue.append(other)
            if offset.drift_ns:
                drifts.append(f"The clocks of {both} drift: by {_time(abs(offset.drift_ns))}.")
    refusals = {other: refusal for other, refusal in refusals.items() if other not in places}
    kept = [place for place in places.values() if not place.shift_ns]
    moved = {names[i]: place for i, place in places.items() if place.shift_ns}
    unseen = [name for i, name in enumerate(names) if i not in {**places, **refusals}]
    contradictory = _refused(refusals, Mismatch.CONTRADICTORY)
    doubts = [
        *(Caveat("clocks_moved", told) for told in _moves(moved)),
        *(Caveat("clocks_contradict", told) for told in contradictory),
        *(Caveat("clocks_drift", told) for told in drifts),
    ]
    neutral = [*_agreement(kept, len(names)), *_refused(refusals, Mismatch.UNCLEAR)]
    return Alignment(
        tuple(places[i].shift_ns if i in places else 0 for i in range(len(names))),
        tuple(i in places for i in range(len(names))),
        max(place.within_ns for place in places.values()),
        " ".join([*neutral, *_unseen(unseen, len(names)), *map(str, doubts)]),
        tuple(doubts),
        "limited" if doubts else "good" if len(kept) > 1 else None,
    )


def _name(trace: Trace) -> str:
    ranks = np.unique(np.concatenate([trace.kernels["rank"], trace.ranges["rank"]]))
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) else trace.meta.source


def compare(first: dict[str, Run], second: dict[str, Run]) -> Offset | Mismatch:
    """Return the offset of the second clock by the collectives of the groups that both are in."""
    matches = [ways(first[group], second[group]) for group in sorted(first.keys() & second.keys())]
    told = [pair for found in matches if len(found) == 1 for pair in found]
    if not told:
        return Mismatch.UNCLEAR if any(matches) else Mismatch.CONTRADICTORY
    joined = [_joined(list(runs)) for runs in zip(*told, strict=True)]
    return measure(*joined) or Mismatch.CONTRADICTORY


def ways(first: Run, second: Run) -> list[Pair]:
    """Return the ways in which the collectives of a group match: by their numbers, or by order.

    Two are as many as any more, and stand for all that is not certain: none with the same number,
    few in the same order, an order in which they do not end together, or as good as another.
    """
    if first.sequence is not None and second.sequence is not None:
        pair = by_number(first, second)
        return [pair] if len(pair[0]) else [pair] * 2
    fitting = [(found, pair) for pair in by_order(first, second) if (found := measure(*pair))]
    fitting.sort(key=lambda way: way[0].spread_ns)
    best = [found for found, _ in fitting[:2]]
    is_certain = (
        len(best) > 0
        and best[0].number >= FEWEST_TO_TELL
        and best[0].spread_ns <= FAR_APART * best[0].skew_ns
        and (len(best) == 1 or best[1].spread_ns > FAR_APART * best[0].spread_ns)
    )
    pairs = [pair for _, pair in fitting[:1]]
    return pairs if is_certain else pairs * 2


def measure(first: Run, second: Run) -> Offset | None:
    """Return the offset that the same collectives show on two clocks; None where they contradict.

    The median difference of their ends, within what causality allows. Few tell no more than
    that; of many, the spread of the differences tells how well the offset is known, though not
    better than collectives end together.
    """
    lows, highs = first.start_ns - second.end_ns, first.end_ns - second.start_ns
    low, high, number = int(lows.max()), int(highs.min()), len(first)
    is_possible = low <= high
    if not is_possible:
        spare = number // ONE_IN
        low = int(np.partition(lows, number - 1 - spare)[number - 1 - spare])
        high = int(np.partition(highs, spare)[spare])
        if low - high > TOLERANCE_NS + _most_drift(first):
            return None
    difference = first.end_ns - second.end_ns
    shorter = np.minimum(first.end_ns - first.start_ns, second.end_ns - second.start_ns)
    skew = END_SKEW_NS + _median(shorter) // END_SKEW_PART
    drift = _drift(first, difference, skew)
    if low - high > TOLERANCE_NS + abs(drift):
        return None
    offset = _median(difference)
    if is_possible:
        offset = min(max(offset, low), high)
    spread = np.sort(np.abs(difference - offset))
    most = int(spread[number * 9 // 10])
    uncertainty, contradiction = max(most, skew), max(low, -high, 0)
    if number >= FEWEST_TO_TELL:
        contradiction = max(contradiction, abs(offset) - FAR_APART * uncertainty)
    if is_possible:
        allowed = max(high - offset, offset - low, RESOLUTION_NS)
        uncertainty = min(uncertainty, allowed) if number >= FEWEST_TO_TELL else allowed
    uncertainty = max(uncertainty, abs(drift))
    return Offset(offset, uncertainty, contradiction, drift, number, most, skew)


def _most_drift(run: Run) -> int:
    return int(np.ptp(run.start_ns)) // FASTEST_DRIFT


def _median(values: NDArray[np.int64]) -> int:
    return int(np.sort(values)[len(values) // 2])


def _drift(first: Run, difference: NDArray[np.int64], skew_ns: int) -> int:
    """Return the change from the first third to the last, carried to the ends, where clear."""
    third = len(first) // 3
    if len(first) < FEWEST_TO_DRIFT:
        return 0
    in_order = difference[np.argsort(first.start_ns, kind="stable")]
    parts = (in_order[:third], in_order[-third:])
    early, late = (_median(part) for part in parts)
    scatter = max(_median(np.abs(part - _median(part))) for part in parts)
    change = (late - early) * 3 // 2
    is_clear = abs(change) > skew_ns + CLEAR_OF_SCATTER * scatter
    return change if is_clear and abs(change) <= _most_drift(first) else 0


def _joined(runs: list[Run]) -> Run:
    return Run(
        np.concatenate([run.operation for run in runs]),
        None,
        np.concatenate([run.start_ns for run in runs]),
        np.concatenate([run.end_ns for run in runs]),
    )


def _placed(known: _Place, offset: Offset) -> _Place:
    """Return where a clock stands by its offset to one that is placed."""
    shift, within = known.shift_ns, known.within_ns + offset.uncertainty_ns
    if offset.contradiction_ns > TOLERANCE_NS:
        shift += offset.offset_ns
    else:
        within += abs(offset.offset_ns)
    # Back where its wall clock had it, as on the first one's host, reached through another.
    if shift and abs(shift) <= TOLERANCE_NS:
        shift, within = 0, within + abs(shift)
    return _Place(shift, within, offset.number)


def _time(time_ns: int, *, sign: str = "") -> str:
    if abs(time_ns) >= 10_000_000_000:
        return f"{time_ns / 1e9:{sign},.1f} s"
    if abs(time_ns) >= 10_000_000:
        return f"{time_ns / 1e6:{sign},.1f} ms"
    return f"{time_ns / 1e3:{sign},.1f} µs"


def _moves(moved: dict[str, _Place]) -> Iterator[str]:
    if len(moved) > NAMED:
        shifts = [place.shift_ns for place in moved.values()]
        remaining = _time(max(place.within_ns for place in moved.values()))
        yield (
            f"The clocks of {counted(len(moved), 'recording')} were moved by "
            f"{_time(min(shifts), sign='+')} "
            f"to {_time(max(shifts), sign='+')}, {_by(list(moved.values()))}; at most {remaining} "
            "of uncertainty remain."
        )
        return
    for name, place in moved.items():
        yield (
            f"The clock of {name} was moved by {_time(place.shift_ns, sign='+')}, {_by([place])}; "
            f"{_time(place.within_ns)} of uncertainty remain."
        )


def _by(places: list[_Place]) -> str:
    numbers = sorted({place.number for place in places})
    most = f" to {numbers[-1]:,}" if len(numbers) > 1 else ""
    return f"by {numbers[0]:,}{most} collectives" if numbers[-1] > 1 else "by 1 collective"


def _refused(refusals: dict[int, tuple[str, Mismatch]], why: Mismatch) -> Iterator[str]:
    pairs = [both for both, reason in refusals.values() if reason is why]
    if pairs:
        yield (
            f"The collectives of {_listed(pairs)} {why.value}: those clocks are not checked by "
            "them."
        )


def _listed(names: list[str]) -> str:
    more = f", and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _agreement(kept: list[_Place], number: int) -> Iterator[str]:
    # The first to be placed is the reference itself.
    if len(kept) > 1:
        whose = "all ranks" if len(kept) == number else counted(len(kept), "recording")
        within = _time(max(place.within_ns for place in kept))
        yield f"The clocks of {whose} agree within {within}, {_by(kept[1:])}."


def _unseen(names: list[str], number: int) -> Iterator[str]:
    if names and len(names) == number - 1:
        yield (
            "The ranks' clocks are not checked: no collective of a named process group was "
            "recorded on several of them."
        )
    elif names:
        yield f"Not checked, for want of a shared collective: {_listed(names)}."
