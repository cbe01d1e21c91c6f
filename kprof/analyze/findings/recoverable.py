"""Recoverable idle time: how much of each piece a fix of its cause would give back.

Findings, predictions and the section on idle time all use it. It holds no start-up. What may be
start-up, for all that a short recording tells, is unknown.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from kprof.analyze.attribution.steps import without_lead
from kprof.analyze.findings.one_offs import (
    ENOUGH_STEPS,
    count_steps_of_window,
    find_once,
    without_start_up,
)
from kprof.analyze.findings.queries import Int64s, idle_of, is_one_of
from kprof.analyze.groupings import number_rows
from kprof.analyze.idle.causes import ALLOCATOR, LAUNCH_BOUND, NO_WORK
from kprof.analyze.intervals import Intervals, disjoint, length_in
from kprof.trace import Trace, once_per_trace

# Share of a gap that has to lie within a pass of the model.
AMID = 0.5
# A wait so many times as long as all others together is one event, not the steps' habit: of two
# alike steps none has it.
OUTLASTS = 2
# Causes of idle time that a first use has.
FIRST_USES = (LAUNCH_BOUND, ALLOCATOR)


@once_per_trace
def idle_in_steps(trace: Trace) -> pd.DataFrame:
    """Return the pieces of idle time in steps, their edges included; all where none is marked.

    They are as long as recorded; `recoverable_ns` is without start-up.
    """
    idle = without_lead(trace).idle.assign(recoverable_ns=recoverable_ns(trace))
    pieces: pd.DataFrame = idle[(idle["duration_ns"] > 0).to_numpy(bool)]
    return pieces


@once_per_trace
def recoverable_ns(trace: Trace) -> pd.arrays.IntegerArray:
    """Return for each row of `idle` the recoverable time; missing where it is unknown."""
    steady, _ = without_start_up(trace)
    seen = without_lead(steady)
    recoverable = seen.idle["recoverable_ns"].copy()
    asleep = sleeps(seen)
    recoverable.iloc[_waits_of_unknown_aim(seen)] = pd.NA
    recoverable.iloc[asleep] = seen.idle["duration_ns"].to_numpy(np.int64)[asleep]
    recoverable.iloc[perhaps_once(trace)] = pd.NA
    found: pd.arrays.IntegerArray = recoverable.array
    return found


@once_per_trace
def stays_ns(trace: Trace) -> Int64s:
    """Return for each row of `idle` how much of it no change of later steps takes away.

    That is start-up, and what may be start-up.
    """
    found: Int64s = find_once(trace).ns.copy()
    rows = perhaps_once(trace)
    found[rows] = trace.idle["duration_ns"].to_numpy(np.int64)[rows]
    return found


@once_per_trace
def perhaps_once(trace: Trace) -> Int64s:
    """Return the rows of `idle` that may be start-up: the recording is too short to tell.

    In fewer than three steps, or a window without steps, that is a wait of a device for a launch,
    or for memory, that is longer than all its others of that cause together, by far.
    """
    found = [np.zeros(0, dtype=np.int64)]
    if trace.is_host_only or count_steps_of_window(trace) >= ENOUGH_STEPS:
        return found[0]
    idle = without_lead(without_start_up(trace)[0]).idle
    asked = np.flatnonzero(idle["cause"].isin(FIRST_USES).to_numpy(bool))
    took = idle["duration_ns"].to_numpy(np.int64)[asked]
    keys = ["rank", "device", "cause"]
    group = number_rows(idle[keys].iloc[asked], keys)
    for one in np.unique(group):
        mine = np.flatnonzero(group == one)
        longest = mine[took[mine].argmax()]
        if took[longest] > OUTLASTS * (took[mine].sum() - took[longest]):
            found.append(asked[[longest]])
    return np.concatenate(found)


def _waits_of_unknown_aim(trace: Trace) -> Int64s:
    """Return the rows of `idle` in which a call of the system waits.

    A worker that loads data, a lock or a request: only stacks tell.
    """
    rows, _ = idle_of(trace, NO_WORK)
    evidence = trace.idle["evidence_row"].to_numpy(np.int64, na_value=-1)[rows]
    is_system = np.append(is_one_of(trace.ranges["kind"], "system"), False)
    return np.asarray(rows[is_system[evidence]])


def sleeps(trace: Trace) -> Int64s:
    """Return the rows of `idle` in which the host slept in training, or amid a model's pass.

    Stacks tell, or calls of the system. Without them sleep looks like Python that computes, and a
    host that shows nothing, outside every step, may do anything.
    """
    rows, _ = idle_of(trace, NO_WORK)
    rows = rows[trace.idle["evidence_row"].notna().to_numpy(bool)[rows]]
    is_training = is_one_of(trace.kernels["phase"], "backward").any()
    return rows if is_training or not len(rows) else _amid_passes(trace, rows)


def _amid_passes(trace: Trace, rows: Int64s) -> Int64s:
    """Return the pieces of idle time that lie within a pass of a model of their rank."""
    ranges, idle = trace.ranges, trace.idle.iloc[rows]
    is_pass = is_one_of(ranges["kind"], "phase") & ~is_one_of(ranges["name"], "data")
    begins = ranges["start_ns"].to_numpy(np.int64)
    ends = begins + ranges["duration_ns"].to_numpy(np.int64)
    start, took = (idle[name].to_numpy(np.int64) for name in ("start_ns", "duration_ns"))
    is_amid = np.zeros(len(rows), dtype=bool)
    for rank in np.unique(idle["rank"].to_numpy()):
        of = np.flatnonzero(is_pass & (ranges["rank"] == rank).to_numpy(bool))
        union = disjoint(Intervals(begins[of], ends[of], of))
        mine = (idle["rank"] == rank).to_numpy(bool)
        inside = length_in(union, start[mine], start[mine] + took[mine])
        is_amid[mine] = inside >= AMID * took[mine]
    return np.asarray(rows[is_amid])
