"""Rates in the steady state of a run, with bounds from slices of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kprof.analyze.sla.times import tokens_by_chunk, total_tokens
from kprof.analyze.sla.wandering import LEAST_SLICES, reach_of
from kprof.responses import Response, Responses, Times

NUM_SLICES = 20
"""At most; a slice lasts as long as the median answer, or longer."""


@dataclass(frozen=True)
class Window:
    """The steady state: from the end of the first answer to the sending of the last request.

    Before it the service fills up, after it runs empty.
    """

    start_ns: int
    end_ns: int
    num_slices: int

    @property
    def duration_s(self) -> float:
        """Its length in seconds."""
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def edges_ns(self) -> Times:
        """Where its slices begin and end."""
        return np.linspace(self.start_ns, self.end_ns, self.num_slices + 1).astype(np.int64)


class Rate(NamedTuple):
    """A rate per second with one-sided bounds, of so many slices, and what those count as."""

    low: float
    estimate: float
    high: float
    num_slices: int
    num_independent: int
    why_fewer: str = ""
    fastest: float | None = None
    """Of the slices: what the service does without a slow spell; missing: as the estimate."""


Counted = Callable[[Response, Times], "tuple[Times, Times]"]
"""How much of a response had come at given times: at least, at most."""


def find_window(run: Responses) -> Window | None:
    """Return the steady state of a run; None: there was none long enough to be sliced."""
    ends = [(row.end_ns, row.end_ns - row.sent_ns) for row in _answered(run) if row.end_ns]
    if not ends:
        return None
    start_ns, end_ns = min(end for end, _ in ends), max(row.sent_ns for row in run.rows)
    typical_ns = float(np.median([taken for _, taken in ends]))
    num_slices = min(int((end_ns - start_ns) / max(typical_ns, 1.0)), NUM_SLICES)
    return Window(start_ns, end_ns, num_slices) if num_slices >= LEAST_SLICES else None


def bound_rate(
    runs: Sequence[Responses], windows: Sequence[Window], counted: Counted
) -> tuple[Rate, tuple[float, ...]]:
    """Return the rate over all runs with its bounds, and that of every run."""
    slices, uncertain = [], []
    for run, window in zip(runs, windows, strict=True):
        least, most = _totals(run, window.edges_ns, counted)
        slices.append(np.diff((least + most) / 2) / (window.duration_s / window.num_slices))
        open_ends = (most - least)[[0, -1]].sum() / 2
        uncertain.append(float(open_ends / window.duration_s))
    every, by_run = np.concatenate(slices), tuple(float(run.mean()) for run in slices)
    found = reach_of(slices)
    mean, reach = float(every.mean()), found.reach + max(uncertain)
    shown = (mean - reach, mean, mean + reach, len(every))
    return Rate(*shown, found.num_independent, found.why_fewer, float(every.max())), by_run


def tokens_counted(response: Response, at_ns: Times) -> tuple[Times, Times]:
    """Count the output tokens of an answer that had come by given times."""
    nothing = np.zeros(len(at_ns), np.int64)
    if response.outcome != "answered":
        return nothing, nothing
    if not len(response.chunk_ns):
        total = (total_tokens(response) or 0) * (at_ns >= (response.end_ns or 0))
        return total, total
    least, most = (np.concatenate([[0], side]) for side in tokens_by_chunk(response))
    arrived = np.searchsorted(response.chunk_ns, at_ns, side="right")
    has_begun, has_ended = arrived > 0, arrived == len(response.chunk_ns)
    at_most = most[arrived]
    if not response.has_every_chunk:
        # Between the first chunk and the last, nobody knows how many have come.
        at_most = np.where(has_begun & ~has_ended, (total_tokens(response) or 0) - 1, at_most)
    return least[arrived], np.minimum(at_most, total_tokens(response) or 0)


def answers_counted(response: Response, at_ns: Times) -> tuple[Times, Times]:
    """Count an answer from its end on."""
    is_there = np.zeros(len(at_ns), np.int64)
    if response.outcome == "answered" and response.end_ns is not None:
        is_there = (at_ns >= response.end_ns).astype(np.int64)
    return is_there, is_there


def _totals(run: Responses, edges_ns: Times, counted: Counted) -> tuple[Times, Times]:
    least, most = np.zeros(len(edges_ns), np.int64), np.zeros(len(edges_ns), np.int64)
    for row in run.rows:
        at_least, at_most = counted(row, edges_ns)
        least, most = least + at_least, most + at_most
    return least, most


def _answered(run: Responses) -> list[Response]:
    return [row for row in run.rows if row.outcome == "answered"]
