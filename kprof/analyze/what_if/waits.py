"""What the host's waiting calls waited for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from kprof.analyze.intervals import NOTHING
from kprof.analyze.what_if.host_program import BEGIN, WAIT_END, HostProgram
from kprof.analyze.what_if.launched import Activities
from kprof.trace import Trace

# A call that finds nothing to wait for, and the way back from the device to one that does.
IDLE_WAIT_NS, RETURN_NS = 5_000, 5_000
# Fewer observations than this tell nothing that is typical.
ENOUGH = 8

LONG_AGO_NS = -(2**62)


@dataclass(frozen=True)
class Waits:
    """What calls wait for: an entry for every pair of a call and an activity."""

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
    idle = int(np.median(took[~has_waited])) if (~has_waited).sum() >= ENOUGH else IDLE_WAIT_NS
    returns = int(np.median(back[has_waited])) if has_waited.sum() >= ENOUGH else RETURN_NS
    own = np.where(asked.is_held(ends), _launch_ns(trace, program, idle), idle)
    own = np.where(has_waited, np.minimum(took, own), took)
    lag = np.zeros(len(program.time_ns), dtype=np.int64)
    lag[ends] = np.where(has_waited, back, np.minimum(returns, back))
    return Waits(point, activity, lag[point], dict(zip(ends.tolist(), own.tolist(), strict=True)))


def _launch_ns(trace: Trace, program: HostProgram, otherwise: int) -> int:
    """Return what a launch takes that finds room in the queue."""
    plain = program.row[(program.what == BEGIN) & ~program.awaits]
    took = trace.ranges["duration_ns"].to_numpy(np.int64)[plain]
    return int(np.median(took)) if len(took) >= ENOUGH else otherwise


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
        self.own = {int(call): int(row) for call, row in last.items()}

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
