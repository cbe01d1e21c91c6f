"""The clocks of several recordings: which of them collectives prove wrong, and by how much."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kprof.collect.collectives import runs_of
from kprof.collect.offsets import TOLERANCE_NS, Mismatch, Offset, compare
from kprof.trace import Trace

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
    doubts: tuple[str, ...] = ()
    """Sentences of the summary that are caveats."""


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
    doubts = [*_moves(moved), *_refused(refusals, Mismatch.CONTRADICTORY), *drifts]
    neutral = [*_agreement(kept, len(names)), *_refused(refusals, Mismatch.UNCLEAR)]
    return Alignment(
        tuple(places[i].shift_ns if i in places else 0 for i in range(len(names))),
        tuple(i in places for i in range(len(names))),
        max(place.within_ns for place in places.values()),
        " ".join([*neutral, *_unseen(unseen, len(names)), *doubts]),
        tuple(doubts),
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


def _agreement(kept: list[_Place], number: int) -> Iterator[str]:
    # The first to be placed is the reference itself.
    if len(kept) > 1:
        whose = "all ranks" if len(kept) == number else f"{len(kept)} recordings"
        within = _time(max(place.within_ns for place in kept))
        yield f"The clocks of {whose} agree within {within}, {_by(kept[1:])}."


def _refused(refusals: dict[int, tuple[str, Mismatch]], why: Mismatch) -> Iterator[str]:
    pairs = [both for both, reason in refusals.values() if reason is why]
    if pairs:
        yield (
            f"The collectives of {_listed(pairs)} {why.value}: those clocks are not checked by "
            "them."
        )


def _unseen(names: list[str], number: int) -> Iterator[str]:
    if names and len(names) == number - 1:
        yield (
            "The ranks' clocks are not checked: no collective of a named process group was "
            "recorded on several of them."
        )
    elif names:
        yield f"Not checked, for want of a shared collective: {_listed(names)}."


def _listed(names: list[str]) -> str:
    more = f", and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _moves(moved: dict[str, _Place]) -> Iterator[str]:
    if len(moved) > NAMED:
        shifts = [place.shift_ns for place in moved.values()]
        remaining = _time(max(place.within_ns for place in moved.values()))
        yield (
            f"The clocks of {len(moved)} recordings were moved by {_time(min(shifts), sign='+')} "
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


def _time(time_ns: int, *, sign: str = "") -> str:
    if abs(time_ns) >= 10_000_000_000:
        return f"{time_ns / 1e9:{sign},.1f} s"
    if abs(time_ns) >= 10_000_000:
        return f"{time_ns / 1e6:{sign},.1f} ms"
    return f"{time_ns / 1e3:{sign},.1f} µs"


def _name(trace: Trace) -> str:
    ranks = np.unique(np.concatenate([trace.kernels["rank"], trace.ranges["rank"]]))
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) else trace.meta.source
