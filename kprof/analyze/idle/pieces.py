"""Gaps cut into pieces of one cause each, moment by moment.

A gap ends when an activity starts. Until its launch could have taken effect the gap is the host's,
and what the launching thread did meanwhile is the cause; after that it is the device's own, or
another stream's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kprof.analyze.idle import causes
from kprof.analyze.idle.gaps import INSIDE, Gaps, Launch
from kprof.analyze.idle.host_state import CAUSE_OF_LAYER, LAYERS, Host
from kprof.analyze.intervals import NOTHING, cut
from kprof.trace import Trace

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
    """What there is to judge the gaps of a trace by."""

    trace: Trace
    gaps: Gaps
    launch: Launch
    host: Host
    floor_ns: int
    """Gaps up to this long are what the device itself needs between two activities."""

    def devices(self) -> list[tuple[int, int]]:
        """Return the devices that were ever idle, as (rank, device)."""
        return sorted(set(zip(self.gaps.rank.tolist(), self.gaps.device.tolist(), strict=True)))

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
    slack_ns = max(floor_ns, 2 * launch.latency_ns)
    until = np.where(is_late & (gaps.end - until <= slack_ns), gaps.end, until)
    until = np.where(_is_short(gaps, floor_ns), gaps.start, until)
    # What no activity ended, the end of the last step did.
    return np.where(row == NOTHING, gaps.end, until)


def _is_short(gaps: Gaps, floor_ns: int) -> np.ndarray:
    return np.asarray((gaps.edge == INSIDE) & (gaps.end - gaps.start <= floor_ns))


def _hosts_part(evidence: Evidence, until: np.ndarray) -> list[Pieces]:
    """Split the host's part of each gap by what the thread did that launched its end."""
    gaps, host, of_thread = evidence.gaps, evidence.host, evidence.thread_row()
    unseen = np.flatnonzero((until > gaps.start) & (of_thread == NOTHING))
    nobody = np.full(len(unseen), UNKNOWN)
    parts = [Pieces(unseen, gaps.start[unseen], until[unseen], nobody, nobody)]
    # When the launch has been made, the host goes on to something else.
    made = np.append(evidence.launch.end, until.max(initial=0))[gaps.row]
    made = np.clip(made, gaps.start, until) if not evidence.trace.is_host_only else until
    under_way = np.flatnonzero((until > made) & (of_thread != NOTHING))
    late = np.full(len(under_way), LATE)
    parts.append(Pieces(under_way, made[under_way], until[under_way], late, of_thread[under_way]))
    seen = np.flatnonzero((made > gaps.start) & (of_thread != NOTHING))
    rank, thread = host.rank[of_thread[seen]], host.thread[of_thread[seen]]
    for one, each in sorted(set(zip(rank.tolist(), thread.tolist(), strict=True))):
        rows = seen[(rank == one) & (thread == each)]
        painting = host.paint(one, each)
        cuts = cut(gaps.start[rows], made[rows], painting)
        layer, row = painting.layer[cuts.segment], painting.row[cuts.segment]
        is_silent = (layer == NOTHING) & (
            painting.lengths(cuts) > SILENCE * evidence.launch.latency_ns
        )
        cause = _causes_of(evidence, layer, row, is_silent)
        parts.append(Pieces(rows[cuts.of], cuts.start, cuts.end, cause, row))
    return parts


def _causes_of(
    evidence: Evidence, layer: np.ndarray, row: np.ndarray, is_silent: np.ndarray
) -> np.ndarray:
    """Return the cause that each layer of evidence proves.

    Outside every step the host may have been asked for nothing; a trace without steps and without
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
    has_steps = len(evidence.host.rows["step"]) > 0 and not trace.is_host_only
    return np.where(is_silent, CODES[causes.NO_WORK] if has_steps else UNKNOWN, cause)


def _devices_part(evidence: Evidence, rest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return cause and evidence of the parts of gaps in which the host was not late."""
    gaps, launch, kernels = evidence.gaps, evidence.launch, evidence.trace.kernels
    row, before = gaps.row[rest], gaps.before[rest]
    stream = kernels["stream"].to_numpy()
    is_collective = (kernels["kind"] == "collective").to_numpy(bool)
    is_known = (launch.row[row] != NOTHING) & (before != NOTHING)
    crosses = is_known & (stream[row] != stream[before])
    # A node of a graph waits for other nodes of it, on whatever stream.
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
