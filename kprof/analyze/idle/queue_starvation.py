"""Queue starvation: idle time after a wait, because the host lost its lead over the device.

While a call blocks the host and the device works on, the host loses its lead, and later launches
come late although nothing delays them any more. The call explains as much idle time as it held the
host while the device was busy, or about to begin earlier launches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kprof.analyze.attribution.steps import step_rows
from kprof.analyze.idle import causes
from kprof.analyze.idle.gaps import BEFORE, CODES, INSIDE, LATE, Evidence, Pieces, joined
from kprof.analyze.idle.host_state import Host
from kprof.analyze.intervals import LAST_NS, NOTHING, Intervals, disjoint, length_in
from kprof.trace import Trace

DRAINED = CODES[causes.PROFILER]
# CUDA queues about this many launches and then blocks the host: no lead is longer.
LONGEST_QUEUE = 1_024
# Codes of the causes that are the host's work or its wait.
HOSTS = [CODES[cause] for cause in causes.RECOVERABLE]


@dataclass(frozen=True)
class Starvation:
    """Which parts of pieces of idle time a wait explains; `row` is the wait's row in `ranges`."""

    piece: np.ndarray
    taken_ns: np.ndarray
    row: np.ndarray


def find_starvation(
    waits: Intervals, held_ns: np.ndarray, launched: np.ndarray, start: np.ndarray, end: np.ndarray
) -> Starvation:
    """Find which pieces [start, end), in order, follow a wait for which the host lost its lead.

    `held_ns` is how much of each wait the device worked; `launched` are the moments, in order, at
    which what the host launched began. The wait that cost most explains a piece first, from the
    piece's begin on.
    """
    first = np.searchsorted(start, waits.end, side="left")
    queued = np.searchsorted(launched, waits.end, side="left") + LONGEST_QUEUE
    until = np.append(launched, LAST_NS)[np.minimum(queued, len(launched))]
    last = np.searchsorted(start, until, side="left")
    before_ns = np.concatenate([[0], np.cumsum(end - start)])
    enough = np.searchsorted(before_ns, before_ns[first] + held_ns, side="left")
    last = np.minimum(last, enough)
    taken, row = [0] * len(start), [NOTHING] * len(start)
    # The next piece that nothing explains, at or after each one, as far as is known.
    free = list(range(len(start) + 1))
    length, before = (end - start).tolist(), before_ns.tolist()
    costly = np.flatnonzero((held_ns > 0) & (last > first))
    costly = costly[np.argsort(-held_ns[costly], kind="stable")]
    columns = (first[costly], last[costly], held_ns[costly], waits.row[costly])
    for begin, stop, held, wait in zip(*(column.tolist() for column in columns), strict=True):
        at = _next_free(free, begin)
        while at < stop:
            taken[at] = min(before[begin] + held - before[at], length[at])
            row[at], free[at] = wait, at + 1
            at = _next_free(free, at)
    explained, by_row = np.array(taken, dtype=np.int64), np.array(row, dtype=np.int64)
    piece = np.flatnonzero(by_row != NOTHING)
    return Starvation(piece, explained[piece], by_row[piece])


def _next_free(free: list[int], at: int) -> int:
    """Follow the links from `at` to one that leads to itself, and shorten them on the way."""
    while free[at] != at:
        free[at] = free[free[at]]
        at = free[at]
    return at


def add_starvation(evidence: Evidence, pieces: Pieces) -> Pieces:
    """Give what the host launched late after a wait to that wait, as far as it cost the lead."""
    kernels, host, launch = evidence.trace.kernels, evidence.host, evidence.launch
    rank, device = (kernels[c].to_numpy(np.int64) for c in ("rank", "device"))
    start = kernels["start_ns"].to_numpy(np.int64)
    end = start + kernels["duration_ns"].to_numpy(np.int64)
    waits, cause_of = host.waits(), host.blocking.to_dict()
    for one in evidence.devices():
        mine = (rank == one[0]) & (device == one[1])
        late = evidence.of_device(pieces, one) & (pieces.cause == LATE)
        late = np.flatnonzero(late & ~_loads_kernels(host, one[0], pieces))
        busy = disjoint(
            Intervals(
                np.append(start[mine], pieces.start[late]),
                np.append(end[mine], pieces.end[late]),
                np.append(np.flatnonzero(mine), pieces.row[late]),
            )
        )
        of_rank = waits.take(host.rank[waits.row] == one[0])
        found = find_starvation(
            of_rank,
            _held_ns(of_rank, busy, evidence.trace),
            np.sort(start[mine & launch.is_first]),
            pieces.start[late],
            pieces.end[late],
        )
        names = [cause_of.get(row, causes.DATA_LOADING) for row in found.row.tolist()]
        cause = np.array([CODES[name] for name in names], dtype=np.int64)
        pieces = _given(pieces, late[found.piece], found.taken_ns, cause, found.row)
    return pieces


def _loads_kernels(host: Host, rank: int, pieces: Pieces) -> np.ndarray:
    """Tell in which pieces the driver mostly loads a kernel: no lead of the host would hide it."""
    loading_ns = length_in(host.union("loaded kernels", rank), pieces.start, pieces.end)
    return np.asarray(2 * loading_ns > pieces.end - pieces.start)


def _held_ns(waits: Intervals, busy: Intervals, trace: Trace) -> np.ndarray:
    """Return how long each wait held the host while the device was `busy`, or would have been.

    A device is busy with the launch that it was given last, too, before that activity begins.

    The recorder had drained the device: a wait in the first step found less to wait for. It is
    taken to hold the host at least as long as the same call does later, in the median.
    """
    held_ns = length_in(busy, waits.start, waits.end)
    if trace.meta.recording is None or not len(busy.end) or not len(waits.row):
        return held_ns
    name = trace.ranges["name"].cat.codes.to_numpy(np.int64)
    around = trace.ranges["parent"].to_numpy(np.int64, na_value=NOTHING)[waits.row]
    call = np.vstack([name[waits.row], np.where(around == NOTHING, NOTHING, name[around])])
    is_drained = waits.start < busy.end[0]
    steps = trace.ranges.iloc[step_rows(trace.ranges)]
    steps = steps[(steps["rank"] == trace.ranges["rank"].iloc[waits.row[0]]).to_numpy(bool)]
    if len(steps) > 1:
        is_drained |= waits.end <= (steps["start_ns"] + steps["duration_ns"]).min()
    for at in np.flatnonzero(is_drained).tolist():
        later = held_ns[~is_drained & (call == call[:, [at]]).all(axis=0)]
        if len(later):
            held_ns[at] = max(held_ns[at], int(np.median(later)))
    return held_ns


def add_drain(evidence: Evidence, pieces: Pieces) -> Pieces:
    """Give to the recorder what it cost to drain the devices before the window.

    The host had no lead then: before the first launch, and afterwards as far as the first step was
    more idle than the later ones.
    """
    gaps, kernels = evidence.gaps, evidence.trace.kernels
    before = np.flatnonzero((pieces.cause == LATE) & (gaps.edge[pieces.gap] == BEFORE))
    length = (pieces.end - pieces.start)[before]
    pieces = _given(pieces, before, length, DRAINED, pieces.row[before])
    for one in evidence.devices():
        step = np.append(kernels["step"].to_numpy(np.int64, na_value=NOTHING), NOTHING)
        step = step[gaps.row[pieces.gap]]
        mine = evidence.of_device(pieces, one) & (gaps.edge[pieces.gap] == INSIDE)
        numbers = np.unique(step[mine & (step != NOTHING)])
        if len(numbers) < 2:
            continue
        length = np.where(mine & np.isin(pieces.cause, HOSTS), pieces.end - pieces.start, 0)
        idle_ns = [int(length[step == number].sum()) for number in numbers]
        extra_ns = idle_ns[0] - int(np.median(idle_ns[1:]))
        first = np.flatnonzero(mine & (pieces.cause == LATE) & (step == numbers[0]))
        used_ns = np.cumsum(length[first]) - length[first]
        taken_ns = np.clip(extra_ns - used_ns, 0, length[first])
        pieces = _given(pieces, first, taken_ns, DRAINED, pieces.row[first])
    return pieces


def _given(
    pieces: Pieces, at: np.ndarray, taken_ns: np.ndarray, cause: np.ndarray | int, row: np.ndarray
) -> Pieces:
    """Give the first `taken_ns` of the pieces `at` to another cause."""
    begin = pieces.start[at]
    codes = np.broadcast_to(cause, len(at))
    taken = Pieces(pieces.gap[at], begin, begin + taken_ns, codes, row)
    shortened = pieces.start.copy()
    shortened[at] += taken_ns
    rest = replace(pieces, start=shortened)
    return joined([rest.take(rest.end > rest.start), taken.take(taken_ns > 0)])
