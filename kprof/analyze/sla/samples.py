"""The samples behind a target: a range of time for every answer, and what had to be left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kprof.analyze.sla.independence import (
    Independent,
    Marks,
    Spells,
    count_independent,
    count_spells,
    fewest,
)
from kprof.analyze.sla.targets import Target
from kprof.analyze.sla.times import NEVER, TIMES, Range, Time, all_gaps, time_to_tokens
from kprof.responses import Response, Responses, Times

Values = npt.NDArray[np.float64]

LONGEST_NS = 2**62

LEFT_OUT = {
    "ttf": "shorter than that many tokens",
    "tpot": "of one token",
    "itl": "of one chunk or token",
    "stall": "of one chunk",
    "gap": "of one chunk",
}


@dataclass(frozen=True)
class Sample:
    """Times in ns of one run, at least (`low`) and at most (`high`), in the order of sending."""

    low: Values
    high: Values
    num_left_out: int = 0
    why_left_out: str = ""
    sizes: Times | None = None
    """How many of them each answer has, where it may have several; missing: one each."""
    due_ns: Times | None = None
    """When each answer was due; missing: not recorded."""
    num_unknown: int = 0
    """Of how many the file leaves open where in the range the time lies."""

    def mark(self, is_marked: npt.NDArray[np.bool_]) -> Marks:
        """Count the marked times of every answer, and its times."""
        if self.sizes is None:
            return Marks(is_marked.astype(np.float64), np.ones(len(is_marked)))
        answers = np.repeat(np.arange(len(self.sizes)), self.sizes)
        marked = np.bincount(answers, weights=is_marked, minlength=len(self.sizes))
        return Marks(marked.astype(np.float64), self.sizes.astype(np.float64))


def independent_at(samples: Sequence[Sample], times: Sequence[float]) -> Independent:
    """Return as how many independent answers all samples count, by those slower than a time.

    Where many are equally slow, those as slow are looked at as well. Of several times the one that
    leaves the fewest counts.
    """
    return fewest(
        [
            count_independent([sample.mark(slower(sample.high, time)) for sample in samples])
            for time in times
            for slower in (np.greater, np.greater_equal)
        ]
    )


def samples_of(target: Target, runs: Sequence[Responses]) -> list[Sample]:
    """Return the sample of every run."""
    name = target.metric.name
    if name == "gap":
        return [_gaps(run) for run in runs]
    return [_sample(run, measure_of(target), LEFT_OUT.get(name, "")) for run in runs]


def measure_of(target: Target) -> Time:
    """Return what measures the target's time of one answer."""
    if target.num_tokens is not None:
        return partial(time_to_tokens, num_tokens=target.num_tokens)
    return TIMES[target.metric.name]


def in_order(run: Responses) -> list[Response]:
    """Return the requests in the order in which they were due."""
    return sorted(run.rows, key=lambda row: (row.due_ns, row.sent_ns, row.end_ns or 0))


def spells_in(
    runs: Sequence[Responses], samples: Sequence[Sample], longest_s: float
) -> Spells | None:
    """Count the longest spells that samples extend over; None: no spell is assumed.

    Runs that overlap in time saw the same spells.
    """
    if not longest_s:
        return None
    due_ns = [np.empty(0, np.int64) if each.due_ns is None else each.due_ns for each in samples]
    sizes = [np.ones(len(each.high)) if each.sizes is None else each.sizes for each in samples]
    return count_spells(
        np.concatenate(due_ns), np.concatenate(sizes).astype(float), load_s(runs), longest_s
    )


def load_s(runs: Sequence[Responses]) -> float:
    """Return for how long requests were under way in some run, in seconds."""
    spans = [(min(r.due_ns for r in run.rows), _last_ns(run)) for run in runs if run.rows]
    covered, reached = 0, -LONGEST_NS
    for start, end in sorted(spans):
        covered += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return covered / 1e9


def _last_ns(run: Responses) -> int:
    return max(max(row.sent_ns, row.end_ns or row.sent_ns) for row in run.rows)


def _sample(run: Responses, measure: Time, why: str) -> Sample:
    rows = in_order(run)
    measured = [measure(row) for row in rows]
    known = [time for time in measured if time is not None]
    due_ns = [row.due_ns for row, time in zip(rows, measured, strict=True) if time is not None]
    left_out = len(measured) - len(known)
    return Sample(
        *_columns(known),
        left_out,
        why,
        due_ns=np.array(due_ns, np.int64),
        num_unknown=sum(width_of(time, row) > 0 for row, time in zip(rows, measured, strict=True)),
    )


def width_of(time: Range | None, row: Response) -> float:
    """Return how far apart the ends of an answer's time are, beyond the client's own lateness."""
    if time is None or row.outcome != "answered":
        return 0.0
    return time.high - time.low - (row.sent_ns - row.due_ns if row.is_due_known else 0)


def _columns(ranges: Sequence[Range]) -> tuple[Values, Values]:
    table = np.array(ranges, np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _gaps(run: Responses) -> Sample:
    """Pool the gaps of all answers; one without an answer counts as one of mean length, late."""
    if not all(row.has_every_chunk for row in run.rows):
        return Sample(np.empty(0), np.empty(0))
    rows = in_order(run)
    lengths = [len(all_gaps(row)) for row in rows if row.outcome == "answered"]
    with_gaps = sum(length > 0 for length in lengths)
    num_each = -(-sum(lengths) // with_gaps) if with_gaps else 1
    of_rows = [(row.due_ns, ranges) for row in rows if len(ranges := _gaps_of(row, num_each))]
    gaps = [ranges for _, ranges in of_rows]
    low, high = (np.concatenate([np.empty(0), *(each[i] for each in gaps)]) for i in (0, 1))
    return Sample(
        low,
        high,
        len(lengths) - with_gaps,
        LEFT_OUT["gap"],
        np.array([len(each[0]) for each in gaps], np.int64),
        np.array([due_ns for due_ns, _ in of_rows], np.int64),
    )


def _gaps_of(row: Response, num_each: int) -> tuple[Values, ...]:
    """Return the gaps of an answer, at least and at most; none where it was one chunk."""
    if row.outcome == "answered":
        known = all_gaps(row).astype(np.float64)
        return (known, known) if len(known) else ()
    least = NEVER if row.outcome == "failed" else 0.0
    return np.full(num_each, least), np.full(num_each, NEVER)
