"""Rates in the steady state of a run, with bounds from slices of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kprof.analyze.sla.independence import CHANCE_OF_RUNS, RUNS_DIFFER, Numbers
from kprof.analyze.sla.percentiles import CONFIDENCE
from kprof.analyze.sla.responses import Response, Responses, Times
from kprof.analyze.sla.samples import tokens_by_chunk, total_tokens

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
    """The rate of the slices without a slow spell; missing: as the estimate."""


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
        # Between the first chunk and the last, the number that has come is unknown.
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


LEAST_SLICES = 5
"""Fewer give no bound worth its name."""
LEAST_FREEDOM = 0.2
"""With fewer degrees of freedom a run is too short for a bound: its slices go one way all along."""
WANDERS = "the rate wanders"


class Reach(NamedTuple):
    """The error of a mean, infinite where it is unknown, and its number of slices."""

    reach: float
    num_independent: int
    why_fewer: str = ""


def reach_of(runs: Sequence[Numbers]) -> Reach:
    """Return how far the mean of all slices may be off: the furthest that is found.

    By the slices; by slices twice as long, as what wanders slowly hides behind noise in short
    ones; and by the means of the runs, where those differ by more than their slices explain.
    """
    found = [_by_slices(runs)]
    if all(len(run) >= 2 * LEAST_SLICES for run in runs):
        found.append(_by_slices([_twice_as_long(run) for run in runs]))
    if len(runs) > 1:
        found.append(_by_runs(runs))
    furthest = max(found, key=lambda each: each.reach)
    fewest = furthest.num_independent if furthest.why_fewer else sum(map(len, runs))
    return furthest._replace(num_independent=fewest)


def _by_slices(runs: Sequence[Numbers]) -> Reach:
    """Take what a slice has in common with the next for the way of all (a process AR(1)).

    Of n slices with a correlation r, n (1 - r) / (1 + r) count as independent. Short series show
    less of r than there is (Marriott and Pope, 1954), and less variance.
    """
    from scipy import stats  # Half a second, which `--help` must not wait for.

    centred = [run - run.mean() for run in runs]
    num, squares = sum(map(len, runs)), float(sum((run**2).sum() for run in centred))
    if not squares:
        return Reach(0.0, num)
    alike = sum(float((run[1:] * run[:-1]).sum()) for run in centred) / squares
    length = num / len(runs)
    correlation = min(max((alike * length + 1) / (length - 3), 0.0), 1.0)
    independent = num * (1 - correlation) / (1 + correlation)
    why = WANDERS if correlation else ""
    freedom = independent - len(runs)
    if freedom < LEAST_FREEDOM:
        return Reach(np.inf, max(int(independent), 1), why)
    variance = squares / num * independent / freedom
    reach = float(stats.t.ppf(CONFIDENCE, freedom) * np.sqrt(variance / independent))
    return Reach(reach, max(int(independent), 1), why)


def _twice_as_long(run: Numbers) -> Numbers:
    pairs: Numbers = run[: len(run) // 2 * 2].reshape(-1, 2).mean(axis=1)
    return pairs


def _by_runs(runs: Sequence[Numbers]) -> Reach:
    """Take runs for what is independent, if they differ by more than chance among slices."""
    from scipy import stats  # Half a second, which `--help` must not wait for.

    means, lengths = np.array([run.mean() for run in runs]), np.array([len(run) for run in runs])
    within = sum(float(((run - run.mean()) ** 2).sum()) for run in runs)
    variance = within / (lengths.sum() - len(runs))
    between = float((lengths * (means - np.average(means, weights=lengths)) ** 2).sum())
    freedom = len(runs) - 1
    if between <= variance * stats.chi2.ppf(1 - CHANCE_OF_RUNS, freedom):
        return Reach(0.0, int(lengths.sum()))
    reach = stats.t.ppf(CONFIDENCE, freedom) * means.std(ddof=1) / np.sqrt(len(runs))
    return Reach(float(reach), len(runs), RUNS_DIFFER)
