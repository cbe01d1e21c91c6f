"""Removal of records with impossible times.

A recorder writes a record that it lost with time 0, or with an end from elsewhere. One such record
makes a window of a millisecond one of a day. Its launch stays, and counts as one without activity.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from kprof.errors import counted
from kprof.trace import Caveat, Trace

# No clock of a device is off by more.
MOST_OFF_NS = 1_000_000_000
# An activity at time 0 or before it is lost where its launch comes after it by so much more than
# the launches of the others come after theirs: clocks are mostly off by less.
MOST_OFF_AT_ZERO_NS = 1_000_000
# Where so many activities contradict their launches, the clock is off and not the records.
FEW = 0.5
# A stream runs one activity at a time, or nearly so; one is damaged where so much of it lies
# after another of its stream has begun and ended within it.
MOST_OVERLAP = 0.5


def without_lost_records(trace: Trace) -> Trace:
    """Leave out what was lost or is damaged, by its times; caveats say how much.

    Other processes' activities on a stream of the same number tell nothing, nor do those of a
    CUDA graph, whose branches share a stream.
    """
    if not trace.has_timeline:
        return trace
    ranges = trace.ranges
    # Calls that a stream's capture took in have no time in torch 2.11, and lose nothing by it.
    is_call = ranges["kind"].isin(["runtime", "overhead"]).to_numpy(bool)
    is_lost_range = _far_at_zero(ranges, trace.kernels) & ~is_call
    if is_lost_range.any() and not is_lost_range.all():
        ranges = ranges[~is_lost_range].reset_index(drop=True)
        trace = _noted(replace(trace, ranges=ranges), "damaged_events", int(is_lost_range.sum()))
    kernels = trace.kernels
    if not len(kernels):
        return trace
    launch = launch_rows(kernels, ranges)
    is_misplaced = _misplaced(kernels, ranges, launch) | _far_at_zero(kernels, ranges)
    is_overrun = ~is_misplaced & _overruns(kernels, ranges, launch, ~is_misplaced)
    is_lost = is_misplaced | is_overrun
    if not is_lost.any() or is_lost.all():
        return trace
    lost_ns = int(kernels["duration_ns"].to_numpy(np.int64)[is_lost].sum())
    trace = replace(trace, kernels=kernels[~is_lost].reset_index(drop=True))
    trace = _noted(trace, "lost_ns", lost_ns)
    told = {
        "misplaced_activities": (
            int(is_misplaced.sum()),
            "lie at time 0, before it, or far from all else, against the time of their launch",
        ),
        "overrun_activities": (
            int(is_overrun.sum()),
            "last until others on their stream have begun and ended, which runs one at a time",
        ),
    }
    for name, (number, what) in told.items():
        if number:
            caveat = Caveat(
                name,
                f"Damaged records left out: {number:,} of "
                f"{counted(len(kernels), 'activity', 'activities')} {what}. "
                f"All that is left out lasts {lost_ns / 1e6:,.3f} ms as recorded.",
            )
            trace = _noted(trace, name, number, caveat)
    return trace


def _far_at_zero(table: pd.DataFrame, others: pd.DataFrame) -> np.ndarray:
    """Tell which rows begin at 0 where all else lies farther away than it is long."""
    start_ns, end_ns = _times(table)
    is_zero = start_ns == 0
    if not is_zero.any():
        return np.asarray(is_zero)
    other_start_ns, other_end_ns = _times(others)
    starts = np.concatenate([start_ns[~is_zero], other_start_ns[other_start_ns != 0]])
    ends = np.concatenate([end_ns[~is_zero], other_end_ns[other_start_ns != 0]])
    if not len(starts) or starts.min() < 0:
        return np.zeros(len(table), dtype=bool)
    first_ns = int(starts.min())
    return np.asarray(is_zero & (first_ns - end_ns > int(ends.max()) - first_ns))


def _times(table: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    start_ns = table["start_ns"].to_numpy(np.int64)
    return start_ns, start_ns + table["duration_ns"].to_numpy(np.int64)


def _noted(trace: Trace, name: str, number: int, caveat: Caveat | None = None) -> Trace:
    counts = {**trace.meta.counts, name: trace.meta.counts.get(name, 0) + number}
    caveats = (*trace.meta.caveats, *([caveat] if caveat else []))
    return replace(trace, meta=replace(trace.meta, counts=counts, caveats=caveats))


# Largest correlation plus one that is multiplied by a rank.
MOST_WIDTH = 2**40


def launch_rows(kernels: pd.DataFrame, ranges: pd.DataFrame) -> np.ndarray:
    """Return the row of each activity's launch; -1 where there is none, or several."""
    is_call = (ranges["kind"] == "runtime") & (ranges["correlation"] >= 0).fillna(value=False)
    calls = np.flatnonzero(is_call.to_numpy(bool))
    ids, wanted = (
        table["correlation"].to_numpy(np.int64, na_value=0) for table in (ranges, kernels)
    )
    rank, ranks = (table["rank"].to_numpy(np.int64) for table in (ranges, kernels))
    width = max(int(ids.max(initial=0)), int(wanted.max(initial=0))) + 1
    if width > MOST_WIDTH:
        # Ranks times ids have to fit in an int64.
        both = np.unique(np.append(ids, wanted), return_inverse=True)[1]
        ids, wanted, width = both[: len(ids)], both[len(ids) :], len(both)
    keys = (rank * width + ids)[calls]
    order = np.argsort(keys, kind="stable")
    keys, calls = keys[order], calls[order]
    is_new = np.append(True, keys[1:] != keys[:-1])
    is_alone = is_new[: len(keys)] & np.append(is_new[1:], True)[: len(keys)]
    keys, calls = np.append(keys[is_alone], -1), np.append(calls[is_alone], -1)
    asked = ranks * width + wanted
    at = np.searchsorted(keys[:-1], asked)
    is_numbered = (kernels["correlation"] >= 0).fillna(value=False).to_numpy(bool)
    is_known = (keys[at] == asked) & is_numbered
    return np.where(is_known, calls[at], -1)


def _misplaced(kernels: pd.DataFrame, ranges: pd.DataFrame, launch: np.ndarray) -> np.ndarray:
    """Tell which activities begin long before their launch, or long after all else has ended."""
    start_ns, end_ns = _times(kernels)
    result = np.zeros(len(kernels), dtype=bool)
    known = np.flatnonzero((launch >= 0) & (kernels["activity"] != "host").to_numpy())
    if not len(known):
        return result
    launch_ns, launch_end_ns = (time_ns[launch[known]] for time_ns in _times(ranges))
    early_ns = launch_ns - start_ns[known]
    # A clock that is off makes all early.
    is_at_zero = (start_ns[known] <= 0) & (launch_ns > 0)
    usual_ns = max(float(np.median(early_ns[~is_at_zero])), 0) if not is_at_zero.all() else 0
    limit_ns = np.where(is_at_zero, MOST_OFF_AT_ZERO_NS + usual_ns, MOST_OFF_NS)
    is_early = early_ns > limit_ns
    if is_early.mean() < FEW:
        result[known] = is_early
    # An activity that waited for longer than the recording, while nothing ran, is misplaced, too.
    order = known[np.argsort(start_ns[known], kind="stable")]
    first_ns, last_ns = int(launch_ns.min()), int(launch_end_ns.max())
    before_ns = np.append(start_ns[order[:1]], end_ns[order][:-1])
    before_ns = np.maximum(np.maximum.accumulate(before_ns), last_ns)
    is_far = start_ns[order] - before_ns > np.maximum(MOST_OFF_NS, before_ns - first_ns)
    result[order[np.logical_or.accumulate(is_far)]] = True
    return result


def _overruns(
    kernels: pd.DataFrame, ranges: pd.DataFrame, launch: np.ndarray, is_sound: np.ndarray
) -> np.ndarray:
    """Tell which activities outlast others that begin after them on their stream."""
    start_ns, end_ns = _times(kernels)
    correlation = kernels["correlation"]
    is_in_graph = kernels[["rank", "correlation"]].duplicated(keep=False) & correlation.notna()
    stream = kernels["stream"].to_numpy(np.int64)
    chosen = is_sound & (stream >= 0) & (end_ns > start_ns) & ~is_in_graph.to_numpy()
    chosen &= (kernels["activity"] != "host").to_numpy()
    chosen &= kernels["graph_node"].isna().to_numpy()
    rows = np.flatnonzero(chosen)
    thread = np.append(ranges["thread"].to_numpy(np.int64), -1)[launch[rows]]
    keys = [
        thread,
        stream[rows],
        kernels["device"].to_numpy(np.int64)[rows],
        kernels["rank"].to_numpy(np.int64)[rows],
    ]
    order = np.lexsort([end_ns[rows], start_ns[rows], *keys])
    rows = rows[order]
    is_last = np.ones(len(rows), dtype=bool)
    is_last[:-1] = np.any([key[order][1:] != key[order][:-1] for key in keys], axis=0)
    result = np.zeros(len(kernels), dtype=bool)
    # Only where so much of an activity overlaps with the next one there is anything to see.
    begun, ended = start_ns[rows], end_ns[rows]
    share = (ended[:-1] - begun[1:]) / (ended[:-1] - begun[:-1])
    overlaps = np.flatnonzero(~is_last[:-1] & (share > MOST_OVERLAP))
    ends = np.flatnonzero(is_last)
    for at in overlaps[::-1].tolist():
        last = ends[np.searchsorted(ends, at)] + 1
        until = at + 1 + int(np.searchsorted(begun[at + 1 : last], ended[at]))
        within = np.arange(at + 1, until)
        within = within[~result[rows[within]]]
        is_inside = (ended[within] <= ended[at]) & (begun[within] > begun[at])
        result[rows[at]] = is_inside.any()
    return result
