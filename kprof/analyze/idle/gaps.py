"""The gaps of every device, cut into pieces of one cause each.

A gap ends when an activity starts. Until its launch could have taken effect the gap is the host's:
the cause is what the launching thread did meanwhile. After that it is the device's own, or another
stream's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import pandas as pd

from kprof.analyze.attribution.steps import step_rows
from kprof.analyze.idle import causes
from kprof.analyze.idle.host_state import CAUSE_OF_LAYER, LAYERS, Host, threads_in
from kprof.analyze.intervals import NOTHING, cut
from kprof.trace import Trace

# From the begin of a launch to that of the kernel on an idle device: a median of 7 to 10 µs under
# CUPTI, a 90th percentile of 9 to 14 µs, on H200, H100 and B200. A recording tells its own, which
# all other times of a device are measured by: so nothing depends on the clock's unit.
LAUNCH_LATENCY_NS = 7_000
ENOUGH_TO_MEASURE = 50
# A single one or two may have waited for something else.
LEAST_TO_MEASURE = 3
# Of few launches the quick ones; of many the median, as far as most are not held up otherwise.
QUICK_PERCENTILE, MOST_TIMES_QUICK = 25, 4
# The time between two kernels that were both queued: a median of 1.1 µs and a 99th percentile of
# 2.5 µs on H200 and H100, as a share of the latency. A recording with enough of them tells its own,
# within these limits.
BETWEEN_KERNELS = Fraction(3, 7)
BETWEEN_KERNELS_LIMITS = Fraction(2, 7), Fraction(8, 7)
# The latency over the median time between two queued kernels, on the same GPUs.
LATENCY_IN_PAUSES = Fraction(70, 11)
# A launch so many latencies before the end of what ran before was in the queue, at any cost.
QUEUED_EARLY = 4

INSIDE, BEFORE, AFTER = 0, 1, 2


@dataclass(frozen=True)
class Gaps:
    """Times in which nothing ran on a device; one entry a gap, by device and in order of time."""

    rank: np.ndarray
    device: np.ndarray
    start: np.ndarray
    end: np.ndarray
    row: np.ndarray
    """Activity that ended it, or `NOTHING`."""
    before: np.ndarray
    """Activity that ran last before it, or `NOTHING`."""
    edge: np.ndarray
    """`INSIDE` the rank's window, `BEFORE` or `AFTER` it."""


def find_gaps(trace: Trace) -> Gaps:
    """Find the gaps of every device of a rank in the rank's window, and at the edges of its steps.

    The window runs from the first activity of the rank to its last. Before it the idle time
    begins with the first recorded step, after it it ends with the last one.
    """
    kernels = trace.kernels
    rank, device = (kernels[c].to_numpy(np.int64) for c in ("rank", "device"))
    start = kernels["start_ns"].to_numpy(np.int64)
    end = start + kernels["duration_ns"].to_numpy(np.int64)
    steps = _step_spans(trace)
    found: list[np.ndarray] = []
    for one in np.unique(rank):
        mine = np.flatnonzero(rank == one)
        window = int(start[mine].min()), int(end[mine].max())
        span = steps.get(int(one), window) if not trace.is_host_only else window
        for each in np.unique(device[mine]):
            rows = mine[device[mine] == each]
            rows = rows[np.argsort(start[rows], kind="stable")]
            gaps = _gaps_of(rows, start[rows], end[rows], window, span)
            found.append(np.vstack([np.full(len(gaps[0]), one), np.full(len(gaps[0]), each), gaps]))
    columns = np.concatenate(found, axis=1) if found else np.zeros((7, 0), dtype=np.int64)
    return Gaps(*columns)


def _step_spans(trace: Trace) -> dict[int, tuple[int, int]]:
    """Return from when to when the steps of each rank lasted on the host."""
    steps = trace.ranges.iloc[step_rows(trace.ranges)]
    ends = steps["start_ns"] + steps["duration_ns"]
    first = steps["start_ns"].groupby(steps["rank"]).min()
    last = ends.groupby(steps["rank"]).max()
    return {int(rank): (int(first[rank]), int(last[rank])) for rank in first.index}


def _gaps_of(
    rows: np.ndarray,
    start: np.ndarray,
    end: np.ndarray,
    window: tuple[int, int],
    span: tuple[int, int],
) -> np.ndarray:
    """Return start, end, row, row before and edge of a device's gaps, cut at its rank's window."""
    covered_to = np.maximum.accumulate(end)
    # The activity that ended last, of those that ended so far.
    last = np.maximum.accumulate(np.where(end == covered_to, np.arange(len(end)), 0))
    outer = min(span[0], window[0]), max(span[1], window[1])
    gap_start = np.concatenate([[outer[0]], covered_to])
    gap_end = np.concatenate([start, [outer[1]]])
    row = np.append(rows, NOTHING)
    before = np.concatenate([[NOTHING], rows[last]])
    parts = []
    borders = (
        (BEFORE, outer[0], window[0]),
        (INSIDE, *window),
        (AFTER, window[1], outer[1]),
    )
    for edge, begin, finish in borders:
        clipped = np.maximum(gap_start, begin), np.minimum(gap_end, finish)
        keep = clipped[1] > clipped[0]
        columns = (*clipped, row, before, np.full(len(row), edge))
        parts.append(np.vstack([column[keep] for column in columns]))
    gaps: np.ndarray = np.concatenate(parts, axis=1)
    return gaps[:, np.argsort(gaps[0], kind="stable")]


@dataclass(frozen=True)
class Launch:
    """When each activity was launched; one entry an activity, `NOTHING` where it is unknown."""

    row: np.ndarray
    """Row of the call in `ranges`."""
    begin: np.ndarray
    end: np.ndarray
    is_first: np.ndarray
    """Whether it is the first that its call launched; the nodes of a graph follow by themselves."""
    ready: np.ndarray
    """When it could have started on an idle device, as far as its launch is concerned."""
    latency_ns: dict[int, int]
    """For each rank the median time from a launch to its start on an idle device."""

    def latency_of(self, rank: np.ndarray) -> np.ndarray:
        """Return that time for each of several ranks."""
        return _of_ranks(self.latency_ns, rank)


def find_launches(trace: Trace) -> Launch:
    """Find when the host launched each activity."""
    kernels, ranges = trace.kernels, trace.ranges
    row = kernels["launch_row"].to_numpy(np.int64, na_value=NOTHING)
    known = row != NOTHING
    start = kernels["start_ns"].to_numpy(np.int64)
    begin, end = start.copy(), start.copy()
    begin[known] = ranges["start_ns"].to_numpy(np.int64)[row[known]]
    end[known] = begin[known] + ranges["duration_ns"].to_numpy(np.int64)[row[known]]
    order = np.lexsort([start, row])
    is_first = np.zeros(len(row), dtype=bool)
    is_first[order] = np.append(True, np.diff(row[order]) != 0)[: len(row)]
    # A call that launched several (a graph) had done so when the first of them ran.
    at_first = np.full(len(ranges) + 1, np.iinfo(np.int64).max)
    np.minimum.at(at_first, row, start)
    end = np.minimum(end, np.where(known, at_first[row], end))
    rank = kernels["rank"].to_numpy(np.int64)
    latency = {}
    for one in np.unique(rank).tolist():
        mine = rank == one
        latency[one] = _latency_ns(kernels[mine], (known & is_first)[mine], begin[mine])
    at_once = begin + 2 * _of_ranks(latency, rank)
    ready = np.where(known & is_first, np.maximum(at_once, end), begin)
    return Launch(row, begin, end, known & is_first, ready, latency)


def _of_ranks(values: dict[int, int], rank: np.ndarray) -> np.ndarray:
    """Return the value of each of several ranks."""
    known = np.array(sorted(values), dtype=np.int64)
    return np.array([values[one] for one in known.tolist()], np.int64)[np.searchsorted(known, rank)]


def _latency_ns(kernels: pd.DataFrame, known: np.ndarray, begin: np.ndarray) -> int:
    """Return the median time from launch to start of what a rank launched late."""
    start = kernels["start_ns"].to_numpy(np.int64)
    end = start + kernels["duration_ns"].to_numpy(np.int64)
    device = kernels["device"].to_numpy()
    order = np.lexsort([start, device])
    is_new = np.append(True, np.diff(device[order]))[: len(order)]
    ended = pd.Series(end[order]).groupby(np.cumsum(is_new)).cummax().to_numpy()
    is_idle = ~is_new.astype(bool) & known[order]
    ended = np.append(0, ended[:-1])[: len(order)]
    is_idle &= begin[order] >= ended
    took = (start - begin)[order]
    seen = took[is_idle & (took > 0)]
    if len(seen) < LEAST_TO_MEASURE:
        # Nodes of a graph follow one another sooner than what is launched one by one.
        is_after = known[order] & ~is_new.astype(bool)
        return _least_latency_ns(took[known[order] & (took > 0)], (start[order] - ended)[is_after])
    quick = _percentile(seen, QUICK_PERCENTILE)
    if len(seen) < ENOUGH_TO_MEASURE:
        return quick
    return min(_percentile(seen, 50), MOST_TIMES_QUICK * quick)


def _least_latency_ns(took: np.ndarray, pauses: np.ndarray) -> int:
    """Return a latency that no launch undercuts, where nearly all were queued.

    `pauses` lie before activities that were launched one by one. Neither launches nor these are
    shorter.
    """
    if len(took) < LEAST_TO_MEASURE:
        return LAUNCH_LATENCY_NS
    pauses = pauses[pauses > 0]
    least = int(took.min())
    return min(least, int(LATENCY_IN_PAUSES * _percentile(pauses, 50))) if len(pauses) else least


def _percentile(times: np.ndarray, percent: float) -> int:
    """Return one of the times, not a mean of two: of times that are all longer it is the same."""
    return int(np.percentile(times, percent, method="lower"))


def between_kernels_ns(gaps: Gaps, launch: Launch) -> np.ndarray:
    """Return for each gap how long one may be that is the device's own time between activities."""
    of_rank = {rank: _between_kernels_ns(gaps, launch, rank) for rank in launch.latency_ns}
    return _of_ranks(of_rank, gaps.rank)


def _between_kernels_ns(gaps: Gaps, launch: Launch, rank: int) -> int:
    inside = (gaps.row != NOTHING) & (gaps.edge == INSIDE) & (gaps.rank == rank)
    row, length = gaps.row[inside], (gaps.end - gaps.start)[inside]
    latency_ns = launch.latency_ns[rank]
    was_queued = launch.begin[row] < gaps.start[inside] - QUEUED_EARLY * latency_ns
    own = length[was_queued & launch.is_first[row] & (length < QUEUED_EARLY * latency_ns)]
    if len(own) < ENOUGH_TO_MEASURE:
        return int(BETWEEN_KERNELS * latency_ns)
    least, most = (int(share * latency_ns) for share in BETWEEN_KERNELS_LIMITS)
    return min(max(_percentile(own, 99), least), most)


# A host that shows nothing for so many launch latencies (a millisecond of 7 µs each), outside every
# step, may wait for work.
SILENCE = 143

UNKNOWN = NOTHING
CODES = {cause: code for code, cause in enumerate(causes.CAUSES)}
LATE = CODES[causes.LAUNCH_BOUND]


@dataclass(frozen=True)
class Pieces:
    """Pieces of gaps; `cause` is a place in `CAUSES` or `UNKNOWN`, `row` evidence in `ranges`."""

    gap: np.ndarray
    start: np.ndarray
    end: np.ndarray
    cause: np.ndarray
    row: np.ndarray

    def take(self, chosen: np.ndarray) -> Pieces:
        """Return the chosen ones, in the order given."""
        columns = (self.gap, self.start, self.end, self.cause, self.row)
        return Pieces(*(column[chosen] for column in columns))


@dataclass(frozen=True)
class Evidence:
    """The evidence for judging the gaps of a trace."""

    trace: Trace
    gaps: Gaps
    launch: Launch
    host: Host
    floor_ns: np.ndarray
    """Gaps up to this long are what the device itself needs between two activities."""

    def devices(self) -> list[tuple[int, int]]:
        """Return the devices that were ever idle, as (rank, device)."""
        return threads_in(self.gaps.rank, self.gaps.device)

    def of_device(self, pieces: Pieces, device: tuple[int, int]) -> np.ndarray:
        """Tell which pieces are of one device."""
        is_its = (self.gaps.rank == device[0]) & (self.gaps.device == device[1])
        return np.asarray(is_its[pieces.gap])

    def thread_row(self) -> np.ndarray:
        """Return for each gap a row of `ranges` on the thread whose launch ended it, or `NOTHING`.

        Where nothing ended it, on the thread that launched last.
        """
        row = np.where(self.gaps.row == NOTHING, self.gaps.before, self.gaps.row)
        launched_by = np.append(self.launch.row, NOTHING)
        return np.asarray(launched_by[row])


def split_gaps(evidence: Evidence) -> Pieces:
    """Split every gap into pieces, in order; they add up to the gaps."""
    gaps = evidence.gaps
    until = _hosts_until(evidence)
    rest = np.flatnonzero(until < gaps.end)
    cause, row = _devices_part(evidence, rest)
    devices = Pieces(rest, until[rest], gaps.end[rest], cause, row)
    return joined([*_hosts_part(evidence, until), devices])


def _hosts_until(evidence: Evidence) -> np.ndarray:
    """Return until when each gap is the host's: all of it, a part, or nothing (its own begin)."""
    gaps, launch, floor_ns = evidence.gaps, evidence.launch, evidence.floor_ns
    if evidence.trace.is_host_only:
        return gaps.end
    row = gaps.row
    is_late = launch.is_first[row] & (launch.ready[row] > gaps.start)
    until = np.where(is_late, np.minimum(launch.ready[row], gaps.end), gaps.start)
    # Launches take longer at times: a short rest is still the launch's.
    slack_ns = np.maximum(floor_ns, 2 * launch.latency_of(gaps.rank))
    until = np.where(is_late & (gaps.end - until <= slack_ns), gaps.end, until)
    until = np.where(_is_short(gaps, floor_ns), gaps.start, until)
    # Idle time that no activity ended is ended by the last step.
    return np.where(row == NOTHING, gaps.end, until)


def _is_short(gaps: Gaps, floor_ns: np.ndarray) -> np.ndarray:
    return np.asarray((gaps.edge == INSIDE) & (gaps.end - gaps.start <= floor_ns))


def _hosts_part(evidence: Evidence, until: np.ndarray) -> list[Pieces]:
    """Split the host's part of each gap by what the thread did that launched its end."""
    gaps, host, of_thread = evidence.gaps, evidence.host, evidence.thread_row()
    unseen = np.flatnonzero((until > gaps.start) & (of_thread == NOTHING))
    unknown_row = np.full(len(unseen), UNKNOWN)
    parts = [Pieces(unseen, gaps.start[unseen], until[unseen], unknown_row, unknown_row)]
    # When the launch has been made, the host goes on to something else.
    made = np.append(evidence.launch.end, until.max(initial=0))[gaps.row]
    made = np.clip(made, gaps.start, until) if not evidence.trace.is_host_only else until
    under_way = np.flatnonzero((until > made) & (of_thread != NOTHING))
    late = np.full(len(under_way), LATE)
    parts.append(Pieces(under_way, made[under_way], until[under_way], late, of_thread[under_way]))
    seen = np.flatnonzero((made > gaps.start) & (of_thread != NOTHING))
    rank, thread = host.rank[of_thread[seen]], host.thread[of_thread[seen]]
    for one, each in threads_in(rank, thread):
        rows = seen[(rank == one) & (thread == each)]
        painting = host.paint(one, each)
        cuts = cut(gaps.start[rows], made[rows], painting)
        layer, row = painting.layer[cuts.segment], painting.row[cuts.segment]
        is_silent = (layer == NOTHING) & (
            painting.lengths(cuts) > SILENCE * evidence.launch.latency_ns[one]
        )
        cause = _causes_of(evidence, one, layer, row, is_silent)
        parts.append(Pieces(rows[cuts.of], cuts.start, cuts.end, cause, row))
    return parts


def _causes_of(
    evidence: Evidence, rank: int, layer: np.ndarray, row: np.ndarray, is_silent: np.ndarray
) -> np.ndarray:
    """Return the cause that each layer of evidence of a rank proves.

    Outside every step the host may have been asked for nothing; a rank without steps and without
    stacks cannot tell that from Python.
    """
    trace, blocking = evidence.trace, evidence.host.blocking
    late = UNKNOWN if trace.is_host_only else LATE
    of_layer = [CODES[CAUSE_OF_LAYER[name]] if name in CAUSE_OF_LAYER else late for name in LAYERS]
    cause = np.array([*of_layer, late])[layer]
    is_blocked = np.isin(layer, [LAYERS.index("blocked"), LAYERS.index("others blocked")])
    of_call = np.full(len(trace.ranges) + 1, UNKNOWN)
    of_call[blocking.index] = [CODES[name] for name in blocking]
    cause = np.where(is_blocked, of_call[row], cause)
    host = evidence.host
    has_steps = (host.rank[host.rows["step"]] == rank).any() and not trace.is_host_only
    return np.where(is_silent, CODES[causes.NO_WORK] if has_steps else UNKNOWN, cause)


def _devices_part(evidence: Evidence, rest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return cause and evidence of the parts of gaps in which the host was not late."""
    gaps, launch, kernels = evidence.gaps, evidence.launch, evidence.trace.kernels
    row, before = gaps.row[rest], gaps.before[rest]
    stream = kernels["stream"].to_numpy()
    is_collective = (kernels["kind"] == "collective").to_numpy(bool)
    is_known = (launch.row[row] != NOTHING) & (before != NOTHING)
    crosses = is_known & (stream[row] != stream[before])
    # A node of a graph waits for other nodes of it, on any stream.
    is_node = is_known & ~launch.is_first[row]
    is_short = _is_short(gaps, evidence.floor_ns)[rest]
    cause = np.full(len(rest), UNKNOWN)
    cause[crosses | is_node] = CODES[causes.DEPENDENCY_WAIT]
    cause[crosses & is_collective[before]] = CODES[causes.COLLECTIVE_WAIT]
    cause[is_short] = CODES[causes.BETWEEN_KERNELS]
    return cause, np.where(is_known & ~is_short, launch.row[row], NOTHING)


def joined(parts: list[Pieces]) -> Pieces:
    """Put pieces in order, and neighbours of one gap and one cause together."""
    columns = ("gap", "start", "end", "cause", "row")
    merged = Pieces(*(np.concatenate([getattr(part, c) for part in parts]) for c in columns))
    merged = merged.take(np.lexsort([merged.start, merged.gap]))
    same = (merged.gap[1:] == merged.gap[:-1]) & (merged.cause[1:] == merged.cause[:-1])
    same &= (merged.row[1:] == merged.row[:-1]) | (merged.cause[1:] == LATE)
    first = np.flatnonzero(np.append(True, ~same)[: len(merged.gap)])
    last = np.append(first[1:], len(merged.gap))[: len(first)] - 1
    return replace(merged.take(first), end=merged.end[last])
