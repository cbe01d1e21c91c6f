"""The predecessors of every launch, activity, wait of a recording.

The host's own time between two points is kept as measured. The device's time after a launch, or
between two activities of a stream, is kept where the trace shows it, and is a typical one where a
queue hid it; the excess stays unexplained. Recordings do not tell which stream waits for which
event: an activity that began late, right after one of another stream of its rank had ended, is
taken to have waited for that one. Two other readings tell how far an answer depends on that: no
such waits at all, and streams that keep their recorded order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from kprof.analyze.attribution.steps import before_launches, number_in
from kprof.analyze.idle.gaps import LAUNCH_LATENCY_NS
from kprof.analyze.intervals import NOTHING
from kprof.analyze.whatif.host_program import BEGIN, MARK, WAIT_END, HostProgram, find_program
from kprof.analyze.whatif.replay import (
    ACROSS,
    HOST,
    LAUNCH,
    STREAM,
    WAIT,
    Edges,
    Parts,
    Replay,
    Spans,
)
from kprof.trace import Trace


@dataclass(frozen=True)
class Activities:
    """The rows of `kernels`, and what came before each of them."""

    start: np.ndarray
    end: np.ndarray
    rank: np.ndarray
    call: np.ndarray
    """Row of the launching call in `ranges`, or `NOTHING`."""
    point: np.ndarray
    """Point of the program at which that call begins, or `NOTHING`."""
    is_first: np.ndarray
    """Whether it is the first of its call; others follow within the call's graph."""
    is_alone: np.ndarray
    """Whether its call launched nothing else: a graph's launch takes longer."""
    before: np.ndarray
    """The activity before it on its stream, or `NOTHING`."""
    lane: np.ndarray
    """Number of its stream, over all devices and ranks."""
    kind: np.ndarray
    """Number of the sort of activity: kernel, memcpy, …"""


def find_activities(trace: Trace, program: HostProgram) -> Activities:
    """Find what came before each row of `kernels` of an attributed trace."""
    kernels = trace.kernels
    start = kernels["start_ns"].to_numpy(np.int64)
    call = kernels["launch_row"].to_numpy(np.int64, na_value=NOTHING)
    begin_of = np.append(program.begin_of(len(trace.ranges)), NOTHING)
    order = np.lexsort([start, call])
    is_first = np.zeros(len(call), dtype=bool)
    is_first[order] = np.append(True, np.diff(call[order]) != 0)[: len(call)]
    lane = kernels.groupby(["rank", "device", "stream"], sort=True).ngroup().to_numpy(np.int64)
    order = np.lexsort([start, lane])
    before = np.full(len(call), NOTHING, dtype=np.int64)
    follows = np.flatnonzero(np.diff(lane[order]) == 0)
    before[order[follows + 1]] = order[follows]
    return Activities(
        start,
        start + kernels["duration_ns"].to_numpy(np.int64),
        kernels["rank"].to_numpy(np.int64),
        call,
        begin_of[call],
        is_first & (call != NOTHING),
        np.bincount(call + 1, minlength=1)[call + 1] == 1,
        before,
        lane,
        kernels["activity"].cat.codes.to_numpy(np.int64),
    )


# A call that finds nothing to wait for, and the way back from the device to one that does.
IDLE_WAIT_NS, RETURN_NS = 5_000, 5_000
# Fewer observations than this tell nothing that is typical.
ENOUGH_WAITS = 8

LONG_AGO_NS = -(2**62)


@dataclass(frozen=True)
class Waits:
    """The waits of calls: an entry for every pair of a call and an activity."""

    end_point: np.ndarray
    """Point of the program at which the call ends."""
    activity: np.ndarray
    lag_ns: np.ndarray
    """From the activity's end to the call's."""
    own_ns: dict[int, int]
    """By the point of its end, what a call takes that finds nothing to wait for."""


def find_waits(trace: Trace, program: HostProgram, those: Activities) -> Waits:
    """Find what each waiting call waited for.

    A copy that blocks waits for itself, a stream's call for the stream that was used last, one
    for an event and a launch into a full queue for what had ended last, others for all that was
    launched before.
    """
    begin_of = program.begin_of(len(trace.ranges))
    ends = np.flatnonzero(program.what == WAIT_END)
    names = trace.ranges["name"].iloc[program.row[ends]].astype(str).tolist()
    asked = _Asked(program, those)
    pairs: list[tuple[int, int]] = []
    for point, name in zip(ends.tolist(), names, strict=True):
        begin = int(program.time_ns[begin_of[program.row[point]]])
        pairs += [(point, one) for one in asked.awaited(name, point, begin)]
    point, activity = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    begin = program.time_ns[begin_of[program.row[ends]]]
    latest = np.full(len(program.time_ns), LONG_AGO_NS)
    np.maximum.at(latest, point, those.end[activity])
    took, back = program.time_ns[ends] - begin, program.time_ns[ends] - latest[ends]
    has_waited = latest[ends] > begin
    idle = (
        int(np.median(took[~has_waited])) if (~has_waited).sum() >= ENOUGH_WAITS else IDLE_WAIT_NS
    )
    returns = int(np.median(back[has_waited])) if has_waited.sum() >= ENOUGH_WAITS else RETURN_NS
    own = np.where(asked.is_held(ends), _launch_ns(trace, program, idle), idle)
    own = np.where(has_waited, np.minimum(took, own), took)
    lag = np.zeros(len(program.time_ns), dtype=np.int64)
    lag[ends] = np.where(has_waited, back, np.minimum(returns, back))
    return Waits(point, activity, lag[point], dict(zip(ends.tolist(), own.tolist(), strict=True)))


def _launch_ns(trace: Trace, program: HostProgram, otherwise: int) -> int:
    """Return what a launch takes that finds room in the queue."""
    plain = program.row[(program.what == BEGIN) & ~program.awaits]
    took = trace.ranges["duration_ns"].to_numpy(np.int64)[plain]
    return int(np.median(took)) if len(took) >= ENOUGH_WAITS else otherwise


class _Asked:
    """Answers what had been launched and had ended, stream by stream, at given moments."""

    def __init__(self, program: HostProgram, those: Activities) -> None:
        self.program, self.those = program, those
        launched = np.where(
            those.point != NOTHING, np.append(program.time_ns, 0)[those.point], LONG_AGO_NS
        )
        order = np.lexsort([those.start, those.lane])
        borders = np.flatnonzero(np.diff(those.lane[order])) + 1
        self.lanes = [rows for rows in np.split(order, borders) if len(rows)]
        # Streams work in order: what was launched, and had ended, is all up to some place.
        self.launched = [np.maximum.accumulate(launched[rows]) for rows in self.lanes]
        self.ended = [np.maximum.accumulate(those.end[rows]) for rows in self.lanes]
        calls = np.flatnonzero(those.call != NOTHING)
        last = pd.Series(calls).groupby(those.call[calls]).last()
        self.own = dict(zip(last.index.tolist(), last.tolist(), strict=True))

    def is_held(self, ends: np.ndarray) -> np.ndarray:
        """Tell which calls end before what they launch: a full queue held them."""
        own = np.array([self.own.get(row, NOTHING) for row in self.program.row[ends].tolist()])
        own = own.astype(np.int64)
        ended = np.append(self.those.end, LONG_AGO_NS)[own]
        return np.asarray((own != NOTHING) & (ended > self.program.time_ns[ends]))

    def awaited(self, name: str, point: int, begin: int) -> list[int]:
        """Return the last activity on each stream that a call waits for; it ends at `point`."""
        those, end = self.those, int(self.program.time_ns[point])
        own = self.own.get(int(self.program.row[point]))
        if own is not None and those.end[own] <= end:
            return [own]
        found = self._done(int(self.program.rank[point]), begin, end)
        if not found:
            return []
        if "Event" in name or own is not None:
            last = max((row for row, _ in found), key=lambda row: int(those.end[row]))
            return [last] if those.end[last] > begin else []
        if "Stream" in name:
            return [max(found, key=lambda pair: pair[1])[0]]
        return [row for row, _ in found]

    def _done(self, rank: int, begin: int, end: int) -> list[tuple[int, int]]:
        """Return for each stream of a rank what was launched by `begin` and ended last by `end`.

        With each the moment of the last launch into its stream by `begin`.
        """
        found = []
        for rows, launched, ended in zip(self.lanes, self.launched, self.ended, strict=True):
            if self.those.rank[rows[0]] != rank:
                continue
            num_launched = int(np.searchsorted(launched, begin, side="right"))
            num_done = min(num_launched, int(np.searchsorted(ended, end, side="right")))
            if num_done:
                found.append((int(rows[num_done - 1]), int(launched[num_launched - 1])))
        return found


# From the begin of a graph's launch to its first node on an idle device: 15 to 18 µs, on an H200.
GRAPH_LATENCY_NS = 17_000
# Between two queued activities of a stream: a median of 1.4 to 1.6 µs on H200 and H100.
BETWEEN_NS = 1_400
# An activity this much later than all that is known to hold it waited for something else.
LATE_NS = 1_000
# An activity that it waited for on another stream ended at most this long before.
AFTER_ANOTHER_NS = 20_000
# Fewer observations than this tell nothing that is typical.
ENOUGH = 8
USUAL_PERCENTILE = 95


Streams = Literal["likely", "free", "in order"]
"""What an activity waits for on other streams: what it began right after, nothing, or all that had
ended before it began."""


@dataclass(frozen=True)
class Recorded:
    """The recorded nodes, and the nodes that each one follows."""

    program: HostProgram
    activities: Activities
    waits: Waits
    host: list[Parts]
    spans: Spans

    @property
    def has_several_streams(self) -> bool:
        """Tell whether any rank used more than one stream, so that one may wait for another."""
        # A lane is of one rank.
        lanes, at = np.unique(self.activities.lane, return_index=True)
        return len(np.unique(self.activities.rank[at])) < len(lanes)

    def replay(self, streams: Streams = "likely", *, is_typical: bool = False) -> Replay:
        """Return the replay under one reading of what streams wait for.

        With `is_typical` the device needs the typical time everywhere, also where the trace shows
        it.
        """
        program, those, waits = self.program, self.activities, self.waits
        first = len(program.time_ns)
        start = np.concatenate([program.time_ns, those.start])
        duration = np.append(np.zeros(first, np.int64), those.end - those.start)
        device, explained = _device_edges(program, those, is_typical=is_typical)
        parts = [*self.host, *device]
        parts.append((waits.activity + first, waits.end_point, waits.lag_ns, WAIT))
        if streams != "free":
            parts += _edges_across(those, explained, first)
        if streams == "in order":
            parts += _edges_in_order(those, first)
        edges = _in_order(parts, _keys(program, those))
        is_root = np.ones(len(start), dtype=bool)
        is_root[edges.target] = False
        return Replay(program, start, duration, edges, is_root, self.spans)


def find_recorded(trace: Trace) -> Recorded:
    """Find the nodes of an attributed trace that has device activities."""
    program = find_program(trace)
    activities = find_activities(trace, program)
    waits = find_waits(trace, program, activities)
    spans = _spans(trace, program, len(program.time_ns))
    return Recorded(program, activities, waits, _host_edges(program, waits), spans)


def _device_edges(
    program: HostProgram, those: Activities, *, is_typical: bool
) -> tuple[list[Parts], np.ndarray]:
    """Return the edges of launches and streams, and from when on they let each activity begin."""
    first, long_ago = len(program.time_ns), np.iinfo(np.int64).min // 2
    before, point = those.before, those.point
    follows = before != NOTHING
    ended = np.where(follows, those.end[before], long_ago)
    launched = np.where(point != NOTHING, np.append(program.time_ns, 0)[point], long_ago)
    after_launch, after_end = those.start - launched, those.start - ended
    is_launched = those.is_first & (point != NOTHING) & (after_launch >= 0)
    was_idle = is_launched & (launched >= ended)
    was_queued = is_launched & follows & (launched < ended - 4 * LAUNCH_LATENCY_NS)
    own_latency = np.where(those.is_alone, LAUNCH_LATENCY_NS, GRAPH_LATENCY_NS)
    kind = 2 * those.kind + those.is_alone
    latency = _typical(after_launch, was_idle, kind, own_latency)
    gap = _typical(after_end, was_queued, those.kind, np.full(len(kind), BETWEEN_NS))
    if not is_typical:
        latency = _as_shown(latency, after_launch, was_idle, kind)
        gap = _as_shown(gap, after_end, was_queued, those.kind)
    # Without a known launch, or inside a graph, the trace shows the lag itself.
    keeps = follows & ~is_launched
    gap = np.where(keeps, after_end, gap)
    parts: list[Parts] = [
        (point[is_launched], _at(is_launched) + first, latency[is_launched], LAUNCH),
        _stream_edges(those, follows & (is_launched | keeps), gap, first),
        _graph_edges(those, first),
    ]
    explained = np.where(
        is_launched,
        np.maximum(launched + latency, np.where(follows, ended + gap, long_ago)),
        those.start,
    )
    return parts, explained


def _stream_edges(those: Activities, chosen: np.ndarray, gap: np.ndarray, first: int) -> Parts:
    return those.before[chosen] + first, _at(chosen) + first, gap[chosen], STREAM


def _at(chosen: np.ndarray) -> np.ndarray:
    return np.asarray(np.flatnonzero(chosen))


def _typical(
    took: np.ndarray, observed: np.ndarray, kind: np.ndarray, otherwise: np.ndarray
) -> np.ndarray:
    """Return the median of those observed of each one's kind, or `otherwise` where they are few."""
    needs = otherwise.copy()
    for one in np.unique(kind):
        seen = took[(kind == one) & observed]
        if len(seen) >= ENOUGH:
            needs[kind == one] = int(np.median(seen))
    return np.asarray(needs)


def _as_shown(
    typical: np.ndarray, took: np.ndarray, observed: np.ndarray, kind: np.ndarray
) -> np.ndarray:
    """Return what each took where that was observed and is usual, and never more than it took."""
    usual = typical.copy()
    for one in np.unique(kind):
        seen = took[(kind == one) & observed]
        if len(seen) >= ENOUGH:
            usual[kind == one] = int(np.percentile(seen, USUAL_PERCENTILE))
    return np.asarray(np.minimum(took, np.where(observed, usual, typical)))


def _graph_edges(those: Activities, first: int) -> Parts:
    """Return what the activities that follow others of their call came after.

    A node follows the last one of its graph that had ended before it; one that began while the
    first ran, the first.
    """
    rows = _at(those.call != NOTHING)
    rows = rows[np.lexsort([those.start[rows], those.call[rows]])]
    calls = pd.Series(those.call[rows])
    of_call = calls.groupby(those.call[rows]).cumcount().to_numpy(np.int64)
    head = np.arange(len(rows)) - of_call
    source = np.full(len(those.call), NOTHING, dtype=np.int64)
    for at in np.flatnonzero(of_call > 0).tolist():
        row, begin = rows[at], head[at]
        near = rows[max(begin, at - 64) : at]
        done = near[those.end[near] <= those.start[row]]
        source[row] = done[those.end[done].argmax()] if len(done) else rows[begin]
    target = _at(source != NOTHING)
    lag = those.start[target] - those.end[source[target]]
    return source[target] + first, target + first, lag, ACROSS


def _edges_across(those: Activities, explained: np.ndarray, first: int) -> list[Parts]:
    """Let what began late, right after something on another stream of its rank, wait for that."""
    late = _at(those.start - explained > LATE_NS)
    pairs = [np.zeros((2, 0), dtype=np.int64)]
    for rank in np.unique(those.rank[late]).tolist():
        rows = _at(those.rank == rank)
        by_end = rows[np.argsort(those.end[rows], kind="stable")]
        ends, mine = those.end[by_end], late[those.rank[late] == rank]
        begin = np.searchsorted(ends, those.start[mine] - AFTER_ANOTHER_NS)
        at = np.searchsorted(ends, those.start[mine], side="right") - 1
        # Back from the last that had ended to the last of another stream.
        lanes = those.lane[by_end]
        run = np.maximum.accumulate(
            np.where(np.append(True, np.diff(lanes) != 0), np.arange(len(rows)), 0)
        )
        is_own = (at >= 0) & (lanes[at] == those.lane[mine])
        at = np.where(is_own, run[at] - 1, at)
        pairs.append(np.vstack([by_end[at], mine])[:, at >= begin])
    source, target = np.concatenate(pairs, axis=1)
    lag = those.start[target] - those.end[source]
    return [(source + first, target + first, lag, ACROSS)]


def _edges_in_order(those: Activities, first: int) -> list[Parts]:
    """Let each activity wait for the last one of another stream that had ended before it began.

    By as long as two activities of a stream need between them, where it began no sooner. One that
    follows another on its stream, which waits as long for the same, needs no edge of its own.
    """
    waits_for = np.full(len(those.start), NOTHING, dtype=np.int64)
    for rank in np.unique(those.rank).tolist():
        rows = _at(those.rank == rank)
        for lane in np.unique(those.lane[rows]).tolist():
            mine, others = rows[those.lane[rows] == lane], rows[those.lane[rows] != lane]
            others = others[np.argsort(those.end[others], kind="stable")]
            at = np.searchsorted(those.end[others], those.start[mine], side="right") - 1
            waits_for[mine[at >= 0]] = others[at[at >= 0]]
    lag = np.minimum(those.start - those.end[waits_for], BETWEEN_NS)
    before = those.before
    is_held = (before != NOTHING) & (waits_for[before] == waits_for) & (lag[before] >= lag)
    target = _at((waits_for != NOTHING) & ~is_held)
    return [(waits_for[target] + first, target + first, lag[target], ACROSS)]


def _host_edges(program: HostProgram, waits: Waits) -> list[Parts]:
    """Return the edges between one point of a program and the next."""
    target = np.flatnonzero(np.diff(program.program) == 0) + 1
    lag = program.time_ns[target] - program.time_ns[target - 1]
    is_own = (program.what[target] == WAIT_END) & (program.row[target] == program.row[target - 1])
    lag[is_own] = [waits.own_ns.get(point, 0) for point in target[is_own].tolist()]
    return [(target - 1, target, lag, HOST), *_spawning(program)]


def _spawning(program: HostProgram) -> list[Parts]:
    """Let a program begin as long after the last point of another as it did."""
    begins = np.flatnonzero(np.append(True, np.diff(program.program) != 0))
    pairs = []
    for at in begins[: len(program.time_ns)].tolist():
        others = (program.program != program.program[at]) & (program.rank == program.rank[at])
        earlier = _at(others & (program.time_ns < program.time_ns[at]))
        if len(earlier):
            pairs.append((int(earlier[program.time_ns[earlier].argmax()]), at))
    source, target = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return [(source, target, program.time_ns[target] - program.time_ns[source], HOST)]


def _keys(program: HostProgram, those: Activities) -> np.ndarray:
    """Return for each node its place in time: sources of edges lie before their targets."""
    keys = 2 * program.time_ns + 2 * (program.what == WAIT_END)
    keys = pd.Series(keys).groupby(program.program).cummax().to_numpy(np.int64)
    launched = np.where(those.point != NOTHING, np.append(keys, 0)[those.point] + 1, -(2**62))
    own = np.maximum(2 * those.start + 1, launched)
    order = np.lexsort([those.start, those.lane])
    sorted_keys = pd.Series(own[order]).groupby(those.lane[order]).cummax().to_numpy(np.int64)
    own[order] = sorted_keys
    return np.append(keys, own)


def _in_order(parts: list[Parts], keys: np.ndarray) -> Edges:
    """Sort the edges by their targets; one that would lead back in time is left out."""
    source, target, lag = (
        np.concatenate([np.asarray(part[i], dtype=np.int64) for part in parts]) for i in range(3)
    )
    kinds = np.array([part[3] for part in parts], dtype=np.int8)
    kind = np.repeat(kinds, [len(part[0]) for part in parts])
    place = np.empty(len(keys), dtype=np.int64)
    place[np.argsort(keys, kind="stable")] = np.arange(len(keys))
    forward = np.flatnonzero(place[source] < place[target])
    forward = forward[np.argsort(place[target[forward]], kind="stable")]
    source, target, lag, kind = (part[forward] for part in (source, target, lag, kind))
    return Edges(source, target, lag, kind, np.zeros_like(lag))


def _spans(trace: Trace, program: HostProgram, first: int) -> Spans:
    """Find which node belongs to which step of its rank."""
    kernels, ranges = trace.kernels, trace.ranges
    of_node = np.full(first + len(kernels), -1, dtype=np.int64)
    of_rank, of_step = kernels["rank"].to_numpy(np.int64), kernels["step"]
    numbers = of_step.to_numpy(np.int64, na_value=NOTHING)
    spans: list[tuple[int, int]] = []
    led_by = np.full(len(of_node), -1, dtype=np.int64)
    is_lead = before_launches(trace)[0]
    for rank in np.unique(of_rank).tolist():
        marks = np.flatnonzero((program.what == MARK) & (program.rank == rank))
        led_by[first:][is_lead & (of_rank == rank)] = len(spans)
        for row in dict.fromkeys(program.row[marks].tolist()):
            number = number_in(str(ranges["name"].iloc[row]))
            of_node[first:][(of_rank == rank) & (numbers == number)] = len(spans)
            of_node[marks[program.row[marks] == row][-1]] = len(spans)
            spans.append((rank, int(marks[0])))
        if not len(marks):
            of_node[first:][of_rank == rank] = len(spans)
            spans.append((rank, NOTHING))
    ranks, mark = np.array(spans, dtype=np.int64).reshape(-1, 2).T
    return Spans(ranks, of_node, mark, np.ones(len(ranks), dtype=bool), led_by)
