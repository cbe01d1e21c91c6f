"""Changes to a replay: work that takes less time or is gone, launches in a graph, no more waits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from kprof.analyze.idle import causes
from kprof.analyze.idle.host_state import find_host
from kprof.analyze.intervals import NOTHING, Intervals, disjoint, length_before
from kprof.analyze.start_up import SILENCE_NS, find_once
from kprof.analyze.what_if.dependencies import GRAPH_LATENCY_NS
from kprof.analyze.what_if.host_program import BEGIN, WAIT_END
from kprof.analyze.what_if.host_time import emptied, without_host_spans, without_host_time
from kprof.analyze.what_if.replay import HOST, LAUNCH, STREAM, WAIT, Replay
from kprof.analyze.what_if.targets import Target, rows_of
from kprof.trace import Trace

# From node to node of a replayed graph, unrecorded: an empty kernel in a graph takes 1.08 µs on an
# H200, and runs for 0.86 (`kprof roofline`).
BETWEEN_NODES_NS = 220
# No kernel takes less: the shortest that CUPTI timed on an H200 (`kprof roofline`).
SHORTEST_KERNEL_NS = 860
# What all rows may take together, 73 years: sums of it and of times of day stay within an int64.
LONGEST_SUM_NS = 2**61

FASTER, ROOFLINE, REMOVED, REPLACED = "faster", "roofline", "removed", "replaced"
GRAPHED, WITHOUT, FILLED = "graphed", "without", "filled"
# A copy to the host, whose result the host may use afterwards.
FETCH = r"DtoH|Device -> (?:Pageable|Pinned|Host)|CopyDeviceToHost"
AVOIDABLE = (
    causes.SYNCHRONIZATION,
    causes.DATA_LOADING,
    causes.PAGEABLE_COPY,
    causes.ALLOCATOR,
)


@dataclass(frozen=True)
class Change:
    """What is asked: what happens, and to what.

    `what` is faster, roofline, removed, replaced, graphed, without or filled. `factor` goes with
    faster, `total_ns` and `launches` (of a step) with replaced, `cause` (of idle time) with
    without, `idle_rows` with filled: the host's time in these pieces of idle time is gone.
    """

    what: str
    target: Target | None = None
    factor: float = 1.0
    cause: str = ""
    total_ns: int = 0
    launches: int = 0
    idle_rows: tuple[int, ...] = ()
    keeps_results: bool = False
    """Whether waits for a result that the host may use stay: no recording tells what it does."""

    def __str__(self) -> str:
        return f"{self.subject} {self.words}"

    @property
    def subject(self) -> str:
        """What changes, in a word: a target, the launches, or a cause of idle time."""
        if self.what == WITHOUT:
            return f"idle:{self.cause}"
        return "launches" if self.target is None else str(self.target)

    @property
    def words(self) -> str:
        """How it changes, as in 2x faster or removed."""
        return {
            FASTER: f"{self.factor:g}x faster",
            ROOFLINE: "at its roofline",
            REMOVED: "removed",
            REPLACED: f"replaced by {self.launches} launches",
            GRAPHED: "in CUDA graphs",
            WITHOUT: "gone",
            FILLED: "filled",
        }[self.what]


def rooflines_ns(trace: Trace) -> np.ndarray:
    """Return each row's time at its roofline; `NOTHING` where that is not known.

    Nor is it where the work is at least so much: with more of it, it takes longer.
    """
    kernels = trace.kernels
    is_least = (kernels["work_bound"] == "at least").to_numpy(bool)
    return np.where(is_least, NOTHING, kernels["limit_ns"].to_numpy(np.int64, na_value=NOTHING))


def new_durations(
    change: Change, trace: Trace, shortest_ns: int = SHORTEST_KERNEL_NS
) -> np.ndarray:
    """Return how long each row of `kernels` would take; faster ones no less than `shortest_ns`."""
    duration = trace.kernels["duration_ns"].to_numpy(np.int64)
    if change.target is None:
        return duration
    rows = rows_of(change.target, trace)
    if change.what == FASTER:
        longest_ns = np.maximum(duration, LONGEST_SUM_NS // max(len(duration), 1))
        changed = np.rint(np.minimum(duration / change.factor, longest_ns)).astype(np.int64)
        least = np.minimum(duration, shortest_ns)
        return np.where(rows, np.maximum(changed, least), duration)
    if change.what == ROOFLINE:
        roofline = rooflines_ns(trace)
        least = np.minimum(duration, np.maximum(roofline, SHORTEST_KERNEL_NS))
        return np.where(rows & (roofline != NOTHING), least, duration)
    kept = _replaced_rows(change, trace)
    each_ns = change.total_ns // max(change.launches, 1)
    return np.where(kept, each_ns, np.where(rows, 0, duration))


def _replaced_rows(change: Change, trace: Trace) -> np.ndarray:
    """Tell which rows stand for what replaces a target: its first launches of every step."""
    kept = np.zeros(len(trace.kernels), dtype=bool)
    if change.what == REPLACED and change.target is not None:
        kernels = trace.kernels
        at = np.flatnonzero(rows_of(change.target, trace))
        at = at[np.argsort(kernels["start_ns"].to_numpy(np.int64)[at], kind="stable")]
        steps = [kernels["rank"].iloc[at], kernels["step"].iloc[at]]
        number = kernels["name"].iloc[at].groupby(steps, dropna=False, observed=True).cumcount()
        kept[at] = number.to_numpy() < change.launches
    return kept


def with_durations(replay: Replay, duration_ns: np.ndarray) -> Replay:
    """Return a replay in which the rows of `kernels` take these times."""
    host = np.zeros(replay.first_activity, dtype=np.int64)
    return replace(replay, duration_ns=np.append(host, duration_ns))


def apply(changes: Iterable[Change], replay: Replay, trace: Trace) -> Replay:
    """Return the replay after all changes."""
    changes = list(changes)
    removed = np.zeros(len(trace.kernels), dtype=bool)
    for one in changes:
        if one.what in (REMOVED, REPLACED) and one.target is not None:
            removed |= rows_of(one.target, trace) & ~_replaced_rows(one, trace)
    if removed.any():
        replay = without_rows(removed, replay, trace)
    for change in changes:
        if change.what in _STRUCTURAL:
            replay = _STRUCTURAL[change.what](change, replay, trace)
    return with_durations(replay, durations_after(changes, trace))


def durations_after(
    changes: Iterable[Change], trace: Trace, shortest_ns: int = SHORTEST_KERNEL_NS
) -> np.ndarray:
    """Return how long each row of `kernels` would take after all changes.

    Of two to the same row the one that takes more off counts.
    """
    duration = trace.kernels["duration_ns"].to_numpy(np.int64)
    after = duration
    for change in changes:
        changed = new_durations(change, trace, shortest_ns)
        both = np.where(after == duration, changed, np.minimum(after, changed))
        after = np.where(changed == duration, after, both)
    return np.asarray(after)


def without_rows(rows: np.ndarray, replay: Replay, trace: Trace) -> Replay:
    """Take rows of `kernels` out, a bool for each; their durations stay the caller's to change.

    What they waited for holds what follows them, and their launches cost nothing. With them goes
    the host's time in these, in operators of which nothing is left, and between two of those.
    """
    edges = replay.edges
    is_gone = np.append(np.zeros(replay.first_activity, dtype=bool), rows)[edges.target]
    lag_ns = np.where(is_gone & (edges.kind == STREAM), np.minimum(edges.lag_ns, 0), edges.lag_ns)
    kept = replace(edges, lag_ns=lag_ns).take(~(is_gone & (edges.kind == LAUNCH)))
    return without_host_time(replace(replay, edges=kept), trace, emptied(rows, trace))


def _graph(change: Change, replay: Replay, trace: Trace) -> Replay:
    """Replay every run of launches between two waits, step edges or loads of data as one graph."""
    edges, segment = replay.edges, segments(replay, trace)
    first = replay.first_activity
    point = np.full(len(replay.start_ns), NOTHING, dtype=np.int64)
    is_launch = edges.kind == LAUNCH
    point[edges.target[is_launch]] = edges.source[is_launch]
    point[:first] = np.arange(first)
    of_node = np.where(point == NOTHING, NOTHING, np.append(segment, NOTHING)[point])
    source, target = of_node[edges.source], of_node[edges.target]
    within = (source == target) & (source != NOTHING)
    lag_ns = np.where(within & (edges.kind == HOST), 0, edges.lag_ns)
    between = np.minimum(edges.lag_ns, BETWEEN_NODES_NS)
    lag_ns = np.where(within & (edges.kind == STREAM), between, lag_ns)
    in_graph = is_launch & (target != NOTHING)
    lag_ns = np.where(in_graph, np.maximum(lag_ns, GRAPH_LATENCY_NS), lag_ns)
    kept_ns = np.minimum(edges.kept_ns, np.maximum(lag_ns, 0))
    return replace(replay, edges=replace(edges, lag_ns=lag_ns, kept_ns=kept_ns))


def segments(replay: Replay, trace: Trace) -> np.ndarray:
    """Return for each point of the host the number of the graph that would hold it, or `NOTHING`.

    Runs of one launch stay as they are.
    """
    program = replay.program
    is_plain = (program.what == BEGIN) & ~program.awaits
    loaded = find_host(trace).rows["loaded"]
    start = trace.ranges["start_ns"].to_numpy(np.int64)[loaded]
    union = disjoint(
        Intervals(start, start + trace.ranges["duration_ns"].to_numpy(np.int64)[loaded], loaded)
    )
    waited = np.diff(length_before(union, program.time_ns)) != 0
    waited |= np.diff(program.time_ns) > SILENCE_NS
    joins = np.zeros(len(program.time_ns), dtype=bool)
    joins[1:] = is_plain[1:] & is_plain[:-1] & (np.diff(program.program) == 0) & ~waited
    number = np.cumsum(~joins)
    sizes = np.bincount(number, minlength=1)
    return np.where(is_plain & (sizes[number] > 1), number, NOTHING)


def _avoid(change: Change, replay: Replay, trace: Trace) -> Replay:
    """Take away what causes idle time: waits, and the host's time that is spent in it."""
    host = find_host(trace)
    if change.cause == causes.DATA_LOADING:
        return without_host_time(replay, trace, host.rows["loaded"])
    calls = host.blocking.index[host.blocking == change.cause].to_numpy(np.int64)
    # What happened once is no part of a step to come: it stays.
    once = trace.idle["evidence_row"].to_numpy(np.int64, na_value=NOTHING)[find_once(trace).ns > 0]
    calls = np.setdiff1d(calls, once)
    if change.cause in (causes.ALLOCATOR, causes.PAGEABLE_COPY):
        # A copy from memory that is not pinned returns before its end, when its last part is
        # staged: then it is no wait, but all of it was the host's time.
        replay = without_host_time(replay, trace, calls)
    program, edges = replay.program, replay.edges
    ends = np.flatnonzero((program.what == WAIT_END) & np.isin(program.row, calls))
    if change.keeps_results:
        ends = ends[~_follows_fetch(ends, replay, trace)]
    is_wait = (edges.kind == WAIT) & np.isin(edges.target, ends)
    return replace(replay, edges=edges.take(~is_wait))


def _follows_fetch(ends: np.ndarray, replay: Replay, trace: Trace) -> np.ndarray:
    """Tell which waits end after a copy to the host that was launched since the wait before."""
    program, edges, first = replay.program, replay.edges, replay.first_activity
    names = trace.kernels["name"].cat
    matches = np.append(np.asarray(names.categories.str.contains(FETCH), dtype=bool), False)
    is_fetch = np.append(np.zeros(first, dtype=bool), matches[names.codes.to_numpy()])
    launch = (edges.kind == LAUNCH) & is_fetch[edges.target]
    fetched = np.zeros(len(program.time_ns), dtype=np.int64)
    fetched[edges.source[launch]] = 1
    before = np.cumsum(fetched)
    all_ends = np.flatnonzero(program.what == WAIT_END)
    at = np.searchsorted(all_ends, ends)
    same = (at > 0) & (program.program[all_ends[np.maximum(at - 1, 0)]] == program.program[ends])
    since = np.where(same, before[all_ends[np.maximum(at - 1, 0)]], 0)
    return np.asarray(before[ends] > since)


def _fill(change: Change, replay: Replay, trace: Trace) -> Replay:
    """Take the host's time within pieces of idle time out of the program that ended them."""
    idle = trace.idle.iloc[list(change.idle_rows)]
    ended_by = idle["kernel_row"].to_numpy(np.int64, na_value=NOTHING)
    launch = np.append(trace.kernels["launch_row"].to_numpy(np.int64, na_value=NOTHING), NOTHING)
    thread = np.append(replay.program.of_ranges(trace), NOTHING)[launch[ended_by]]
    start = idle["start_ns"].to_numpy(np.int64)
    end = start + idle["duration_ns"].to_numpy(np.int64)
    gone = {
        one: disjoint(Intervals(start[thread == one], end[thread == one], ended_by[thread == one]))
        for one in np.unique(thread[thread != NOTHING]).tolist()
    }
    return without_host_spans(replay, gone)


_STRUCTURAL = {GRAPHED: _graph, WITHOUT: _avoid, FILLED: _fill}
