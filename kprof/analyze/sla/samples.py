"""The samples behind a target: a range of time for every answer, and what had to be left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kprof.analyze.sla.targets import Target
from kprof.analyze.sla.times import NEVER, TIMES, Range, Time, all_gaps, time_to_tokens
from kprof.responses import Response, Responses

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
    num_answers: int | None = None
    """Of how many answers they are, where one answer has several; missing: one each."""

    @property
    def num_independent(self) -> int:
        """How many of them can count as independent: those of one answer are not."""
        return len(self.high) if self.num_answers is None else self.num_answers


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
    outcomes = Counter(row.outcome for row in run.rows)
    if not all(row.has_every_chunk for row in run.rows):
        return Sample(np.empty(0), np.empty(0))
    gaps = [all_gaps(row) for row in in_order(run) if row.outcome == "answered"]
    known = np.concatenate([np.empty(0), *gaps])
    with_gaps = sum(len(each) > 0 for each in gaps)
    num_each = -(-len(known) // with_gaps) if with_gaps else 1
    lost = np.full(num_each * (outcomes["failed"] + outcomes["cancelled"]), NEVER)
    high = np.concatenate([known, lost])
    low = np.concatenate([known, np.full(num_each * outcomes["cancelled"], 0.0)])
    low = np.concatenate([low, np.full(len(high) - len(low), NEVER)])
    num_answers = with_gaps + outcomes["failed"] + outcomes["cancelled"]
    return Sample(low, high, len(gaps) - with_gaps, LEFT_OUT["gap"], num_answers)
