"""The samples behind a target: a range of time for every answer, and what had to be left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kprof.analyze.sla.independence import Independent, Marks, count_independent, fewest
from kprof.analyze.sla.targets import Target
from kprof.analyze.sla.times import NEVER, TIMES, Range, Time, all_gaps, time_to_tokens
from kprof.responses import Response, Responses, Times

Values = npt.NDArray[np.float64]

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
    return sorted(run.rows, key=lambda row: row.due_ns)


def _sample(run: Responses, measure: Time, why: str) -> Sample:
    measured = [measure(row) for row in in_order(run)]
    known = [time for time in measured if time is not None]
    return Sample(*_columns(known), len(measured) - len(known), why)


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
    gaps = [ranges for row in rows if len(ranges := _gaps_of(row, num_each))]
    low, high = (np.concatenate([np.empty(0), *(each[i] for each in gaps)]) for i in (0, 1))
    return Sample(
        low,
        high,
        len(lengths) - with_gaps,
        LEFT_OUT["gap"],
        np.array([len(each[0]) for each in gaps], np.int64),
    )


def _gaps_of(row: Response, num_each: int) -> tuple[Values, ...]:
    """Return the gaps of an answer, at least and at most; none where it was one chunk."""
    if row.outcome == "answered":
        known = all_gaps(row).astype(np.float64)
        return (known, known) if len(known) else ()
    least = NEVER if row.outcome == "failed" else 0.0
    return np.full(num_each, least), np.full(num_each, NEVER)
