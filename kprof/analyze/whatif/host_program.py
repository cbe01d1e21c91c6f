"""The host's program: its launches, its waits, the time between them.

The thread that runs the steps and those of autograd are one program: `backward()` holds its caller
until autograd's threads are done. Every other thread that launches or waits is one of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from kprof.analyze.attribution.call_tree import is_evaluation, is_node, nearest
from kprof.analyze.attribution.steps import CROSSING_NS, step_rows
from kprof.analyze.idle.causes import SYNCHRONIZING_CALL
from kprof.analyze.idle.host_state import matching
from kprof.analyze.intervals import NOTHING
from kprof.trace import Trace, once_per_tables

# CUDA lets some 1,000 launches wait on a device; the next one holds the host until there is room.
# (In a recording of a V100 never more than 1,018 were waiting.)
QUEUE_HOLDS = 1_000
# A launch so many times as long as one into a queue with room was held.
HELD = 2
LONG_AFTER_NS = 2**62

BEGIN, WAIT_END, MARK = 0, 1, 2


@dataclass(frozen=True)
class HostProgram:
    """Points in the host's time, by program and in order; every array has one entry a point."""

    time_ns: np.ndarray
    program: np.ndarray
    """Number of the program; points of one run after one another."""
    rank: np.ndarray
    row: np.ndarray
    """The call, or the step of a mark, in `ranges`."""
    what: np.ndarray
    """`BEGIN` of a call, `WAIT_END` of one that waits, or `MARK`: an edge of a step."""
    awaits: np.ndarray
    """Whether the call waits for the device, at its begin and its end."""

    def begin_of(self, num_ranges: int) -> np.ndarray:
        """Return for every row of `ranges` the point at which that call begins, or `NOTHING`."""
        found = np.full(num_ranges, NOTHING, dtype=np.int64)
        at = np.flatnonzero(self.what == BEGIN)
        found[self.row[at]] = at
        return found

    def of_ranges(self, trace: Trace, rows: np.ndarray | None = None) -> np.ndarray:
        """Return for these rows of `ranges`, or all, the program of their thread, or `NOTHING`."""
        thread = number_threads(trace)
        program = np.full(int(thread.max(initial=0)) + 1, NOTHING, dtype=np.int64)
        program[thread[self.row]] = self.program
        return np.asarray(program[thread if rows is None else thread[rows]])


@once_per_tables("ranges")
def number_threads(trace: Trace) -> np.ndarray:
    """Return for every row of `ranges` the number of its thread among those of all ranks."""
    number = np.zeros(len(trace.ranges), dtype=np.int64)
    for column in ("rank", "thread"):
        codes, distinct = pd.factorize(trace.ranges[column].to_numpy(np.int64), sort=True)
        number = number * max(len(distinct), 1) + codes
    is_used = np.bincount(number) > 0
    return np.asarray((np.cumsum(is_used) - 1)[number])


@once_per_tables("kernels", "ranges")
def find_program(trace: Trace) -> HostProgram:
    """Find the points of every program of an attributed trace."""
    ranges, kernels = trace.ranges, trace.kernels
    start = ranges["start_ns"].to_numpy(np.int64)
    end = start + ranges["duration_ns"].to_numpy(np.int64)
    awaits, is_call = np.zeros((2, len(ranges)), dtype=bool)
    for rows in (
        matching(ranges, "runtime", SYNCHRONIZING_CALL),
        _blocking(trace, end),
        _held(trace, start, end),
    ):
        awaits[rows] = True
    is_call[kernels["launch_row"].dropna().to_numpy(np.int64)] = True
    waiting, calls = np.flatnonzero(awaits), np.flatnonzero(awaits | is_call)
    steps = step_rows(ranges)
    row = np.concatenate([calls, waiting, steps, steps]).astype(np.int64)
    sizes = [len(calls), len(waiting), 2 * len(steps)]
    what = np.repeat(np.array([BEGIN, WAIT_END, MARK]), sizes)
    time_ns = np.concatenate([start[calls], end[waiting], start[steps], end[steps]])
    program = _programs(trace, calls, steps)[row]
    # A call begins after what ended at that moment, unless that is itself; an edge of a step does
    # not cut a wait from its begin.
    is_ending = (what == WAIT_END) & (end[row] > start[row])
    rounded_ns = _before_waits(time_ns, what, program, start[waiting])
    order = np.lexsort([what, what != MARK, ~is_ending, rounded_ns, program])
    time_ns = np.where(what == MARK, rounded_ns, time_ns)
    return HostProgram(
        time_ns[order],
        program[order],
        ranges["rank"].to_numpy(np.int64)[row[order]],
        row[order],
        what[order],
        awaits[row[order]],
    )


def _before_waits(
    time_ns: np.ndarray, what: np.ndarray, program: np.ndarray, waits_ns: np.ndarray
) -> np.ndarray:
    """Return the times of points, edges of steps that lie barely within a wait at its begin."""
    moved_ns = time_ns.copy()
    of_waits = program[what == WAIT_END]
    for one in np.unique(program[what == MARK]):
        begins = np.sort(waits_ns[of_waits == one])
        marks = np.flatnonzero((what == MARK) & (program == one))
        at = np.searchsorted(begins, time_ns[marks], side="right") - 1
        begun = np.append(begins, LONG_AFTER_NS)[at]
        is_within = (begun <= time_ns[marks]) & (time_ns[marks] - begun <= CROSSING_NS)
        moved_ns[marks[is_within]] = begun[is_within]
    return np.asarray(moved_ns)


def _blocking(trace: Trace, end: np.ndarray) -> np.ndarray:
    """Return the copying calls that were not over before their copy: they wait for it."""
    kernels = trace.kernels
    row = kernels["launch_row"].to_numpy(np.int64, na_value=NOTHING)
    finish = (kernels["start_ns"] + kernels["duration_ns"]).to_numpy(np.int64)
    is_copy = (kernels["activity"] == "memcpy").to_numpy(bool) & (row != NOTHING)
    rows: np.ndarray = np.unique(row[is_copy & (finish <= np.append(end, 0)[row])])
    return rows


def _held(trace: Trace, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return the launches that were held because the device's queue was full."""
    kernels = trace.kernels
    row = kernels["launch_row"].to_numpy(np.int64, na_value=NOTHING)
    began, rank = kernels["start_ns"].to_numpy(np.int64), kernels["rank"].to_numpy()
    found = [np.zeros(0, dtype=np.int64)]
    for one in np.unique(rank):
        mine = np.flatnonzero((rank == one) & (row != NOTHING))
        calls, at = np.unique(row[mine], return_index=True)
        launched, started = np.sort(start[calls]), np.sort(began[mine][at])
        took = end[calls] - start[calls]
        waiting = np.searchsorted(launched, start[calls]) - np.searchsorted(started, start[calls])
        is_full = waiting >= QUEUE_HOLDS
        if is_full.any() and not is_full.all():
            found.append(calls[is_full & (took > HELD * np.median(took[~is_full]))])
    return np.concatenate(found)


def _programs(trace: Trace, calls: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Return for every row of `ranges` the program that its thread belongs to."""
    ranges, threads = trace.ranges, number_threads(trace)
    rank = ranges["rank"].to_numpy(np.int64)
    number = np.arange(int(threads.max(initial=0)) + 1)
    is_backward = is_node(ranges) | is_evaluation(ranges)
    of_autograd = np.unique(threads[is_backward])
    parent = ranges["parent"].to_numpy(np.int64, na_value=NOTHING)
    in_backward = nearest(calls, parent, is_backward) != NOTHING
    for one in np.unique(rank[calls]):
        marks, mine = steps[rank[steps] == one], rank[calls] == one
        # Autograd's thread may make most calls, but never those outside of its nodes.
        others = mine & ~in_backward
        votes = threads[marks] if len(marks) else threads[calls[others if others.any() else mine]]
        main = int(np.bincount(votes).argmax())
        mine = np.unique(threads[rank == one])
        number[np.intersect1d(of_autograd, mine)] = main
    return np.asarray(number[threads])
