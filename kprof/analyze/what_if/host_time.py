"""The host's time that goes with what it no longer launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from kprof.analyze.intervals import NOTHING, Intervals, disjoint, either, length_in
from kprof.analyze.what_if.host_program import HostProgram, number_threads
from kprof.analyze.what_if.replay import HOST, Replay
from kprof.trace import Trace, once_per_trace

# What Python does from one operator to the next takes some µs, or tens of them under a recorder.
# Longer than this it did something of its own.
CALL_NS = 50_000
# A call that takes so long, and so many times as long as is usual for its name, uses something for
# the first time: a library is loaded, a plan is made.
FIRST_USE_NS, FIRST_USE = 1_000_000, 20


def emptied(rows: np.ndarray, trace: Trace) -> np.ndarray:
    """Return the calls and operators of which all activities are among `rows` of `kernels`.

    Those within which something was used for the first time stay: others would use it, too.
    """
    ranges = trace.ranges
    parent = np.append(ranges["parent"].to_numpy(np.int64, na_value=NOTHING), NOTHING)
    is_call = ranges["kind"].isin(["op", "runtime"]).to_numpy(bool)
    found = np.zeros(len(ranges), dtype=bool)
    for column in ("launch_row", "op_row"):
        of = trace.kernels[column].to_numpy(np.int64, na_value=NOTHING)
        found |= _within(of[rows], parent) & ~_within(of[~rows], parent)
    found &= is_call
    return np.flatnonzero(found & ~_within(_first_uses(found, ranges), parent))


def _first_uses(found: np.ndarray, ranges: pd.DataFrame) -> np.ndarray:
    """Return the rows of `found` that take far longer than is usual for their name and kind."""
    took_ns = ranges["duration_ns"].to_numpy(np.float64, na_value=0.0)
    long = np.flatnonzero(found & (took_ns >= FIRST_USE_NS))
    if not len(long):
        return long
    names = ranges["name"]
    alike = np.flatnonzero(names.isin(names.iloc[long]).to_numpy(bool))
    keys = [ranges[column].iloc[alike].to_numpy() for column in ("kind", "name")]
    usual_ns = np.full(len(ranges), np.inf)
    usual_ns[alike] = pd.Series(took_ns[alike]).groupby(keys).transform("median").to_numpy()
    return np.asarray(long[took_ns[long] > FIRST_USE * usual_ns[long]])


def _within(rows: np.ndarray, parent: np.ndarray) -> np.ndarray:
    """Tell of every range whether one of `rows` stands in it, or is it."""
    found = np.zeros(len(parent), dtype=bool)
    found[rows[rows != NOTHING]] = True
    rows = np.flatnonzero(found)
    while len(rows):
        is_next = np.zeros(len(parent), dtype=bool)
        is_next[parent[rows]] = True
        is_next[NOTHING] = False
        rows = np.flatnonzero(is_next & ~found)
        found[rows] = True
    return found[:-1]


def without_host_time(replay: Replay, trace: Trace, gone: np.ndarray) -> Replay:
    """Take the host's time within the ranges `gone` out of their programs.

    Of operators with nothing between them also what Python needed to get from one to the next.
    """
    return without_host_spans(replay, spans_by_program(gone, replay.program, trace))


def spans_by_program(gone: np.ndarray, program: HostProgram, trace: Trace) -> dict[int, Intervals]:
    """Return when the ranges `gone` were open, by the program of their thread."""
    start, end, row = _spans_of(gone, trace)
    of_range = program.of_ranges(trace)[row]
    return {
        one: disjoint(Intervals(start[of_range == one], end[of_range == one], row[of_range == one]))
        for one in np.unique(of_range[of_range != NOTHING]).tolist()
    }


def without_host_spans(replay: Replay, gone: Mapping[int, Intervals]) -> Replay:
    """Take the host's time within a union of intervals out of each program."""
    edges, program = replay.edges, replay.program
    lag_ns, kept_ns = edges.lag_ns.astype(float), edges.kept_ns.copy()
    is_host = edges.kind == HOST
    for one, union in gone.items():
        at = np.flatnonzero(is_host)
        at = at[program.program[edges.target[at]] == one]
        until, since = (program.time_ns[node[at]] for node in (edges.target, edges.source))
        removed_ns, kept = length_in(union, since, until), edges.kept_ns[at]
        removed_kept_ns = np.zeros_like(removed_ns)
        if one in replay.untouched:
            both = _in_both(union, replay.untouched[one], since, until)
            removed_kept_ns = np.minimum(both, kept)
        # Of a lag that is no longer as recorded the same share goes.
        rest = 1 - (removed_ns - removed_kept_ns) / np.maximum(until - since - kept, 1)
        kept_ns[at] = kept - removed_kept_ns
        lag_ns[at] = kept_ns[at] + (lag_ns[at] - kept) * np.clip(rest, 0, 1)
    lag_ns = np.rint(lag_ns).astype(np.int64)
    return replace(replay, edges=replace(edges, lag_ns=lag_ns, kept_ns=kept_ns))


def _in_both(one: Intervals, other: Intervals, since: np.ndarray, until: np.ndarray) -> np.ndarray:
    """Return how much of the overlap of two unions lies between each two moments."""
    first, second, together = (
        length_in(union, since, until) for union in (one, other, either(one, other))
    )
    return np.asarray(first + second - together)


def _spans_of(gone: np.ndarray, trace: Trace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return starts, ends and rows of ranges, operators up to a next one that follows at once."""
    start, duration = (trace.ranges[c].to_numpy(np.int64) for c in ("start_ns", "duration_ns"))
    this, following = _operators_in_turn(trace)
    is_gone = np.zeros(len(start), dtype=bool)
    is_gone[gone] = True
    joins = is_gone[this] & is_gone[following]
    until = start + duration
    until[this[joins]] = np.maximum(until[this[joins]], start[following[joins]])
    return start[gone], until[gone], gone


@once_per_trace
def _operators_in_turn(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs of operators of which the second follows the first at once.

    Nothing stands between them that the host recorded, and both stand in the same range.
    """
    ranges, thread = trace.ranges, number_threads(trace)
    start = ranges["start_ns"].to_numpy(np.int64)
    end = start + ranges["duration_ns"].to_numpy(np.int64)
    parent = ranges["parent"].to_numpy(np.int64, na_value=NOTHING)
    shown = np.flatnonzero(~ranges["kind"].isin(["python", "overhead"]).to_numpy(bool))
    order = shown[np.lexsort([start[shown], parent[shown], thread[shown]])]
    this, following = order[:-1], order[1:]
    is_op = (ranges["kind"] == "op").to_numpy(bool)
    joins = is_op[this] & is_op[following] & (thread[this] == thread[following])
    joins &= (parent[this] == parent[following]) & (start[following] - end[this] <= CALL_NS)
    return this[joins], following[joins]
