"""Which of a run's marks are its steps: of each rank some that come one after another.

A mark is a range of the kind `step`. More than one may be open at a time: torch's profiler marks
the steps of its schedule even while it only waits, beside kprof's own; two threads may mark the
same steps; a mark may lie around others. Everything that counts or times steps goes by these.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

# As torch's profiler calls a step of its schedule; kprof's own have a number alone.
OF_TORCH = "ProfilerStep#"
# The host's ranges may cross by some ns, and by one of the whole microseconds of an old file.
CROSSING_NS = 1_000


@dataclass(frozen=True)
class Marks:
    """The marks of a trace, sorted out."""

    steps: np.ndarray
    """Rows of `ranges` that are steps, in the order of their starts; of a rank none overlap."""
    of_torch: np.ndarray
    """Rows that torch's profiler marked in ranks that kprof marked, too: no steps."""
    doubtful: np.ndarray
    """Rows left out because they overlap with the steps, though nothing else sets them apart."""


def sort_out(ranges: pd.DataFrame) -> Marks:
    """Decide which marks are steps.

    Of each rank kprof's own, where there are any. Of marks around one another the one around
    several is no step, but a part of the run; one in a single other marks the same step again.
    Of threads whose marks overlap the one with most counts.
    """
    marks = np.flatnonzero((ranges["kind"] == "step").to_numpy(bool))
    rank, thread, start = (
        ranges[c].to_numpy(np.int64)[marks] for c in ("rank", "thread", "start_ns")
    )
    end = start + ranges["duration_ns"].to_numpy(np.int64)[marks]
    is_torchs = _names_of_torch(ranges, marks)
    steps, of_torch = np.zeros((2, len(marks)), dtype=bool)
    for one in np.unique(rank):
        mine = rank == one
        if not is_torchs[mine].all():
            of_torch |= mine & is_torchs
            mine &= ~is_torchs
        steps[_of_rank(np.flatnonzero(mine), thread, start, end)] = True
    chosen = marks[steps][np.argsort(start[steps], kind="stable")]
    return Marks(chosen, marks[of_torch], marks[~steps & ~of_torch])


def step_rows(ranges: pd.DataFrame) -> np.ndarray:
    """Return the rows of `ranges` that are the run's steps, in the order of their starts."""
    return sort_out(ranges).steps


def _names_of_torch(ranges: pd.DataFrame, marks: np.ndarray) -> np.ndarray:
    names = ranges["name"].iloc[marks].astype(str)
    return names.str.startswith(OF_TORCH).to_numpy(bool)


def _of_rank(
    marks: np.ndarray, thread: np.ndarray, start: np.ndarray, end: np.ndarray
) -> np.ndarray:
    """Return the steps among the marks of a rank: of all its threads, or of the one with most."""
    together = _one_after_another(marks, start, end)
    parts = [
        _one_after_another(marks[thread[marks] == one], start, end)
        for one in np.unique(thread[marks])
    ]
    if len(together) == sum(map(len, parts)):
        return together
    return max(parts, key=lambda part: (len(part), -int(start[part[0]])))


def _one_after_another(marks: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return marks that do not overlap: what ends first comes first, inner ones before outer."""
    chosen: list[int] = []
    for mark in marks[np.lexsort([-start[marks], end[marks]])].tolist():
        before = len(chosen)
        while before and start[chosen[before - 1]] >= start[mark]:
            before -= 1
        is_around_several = len(chosen) - before > 1
        crosses = before > 0 and end[chosen[before - 1]] > start[mark] + CROSSING_NS
        if not is_around_several and not crosses:
            chosen[before:] = [mark]
    return np.array(chosen, dtype=np.int64)
