"""Counters that were sampled during a recording, laid out on its clock."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd

from kprof.collect.readers.kineto.damage import UNREADABLE
from kprof.trace import Caveat, Trace, columns_of

FILE = "counters.json"
QUANTITIES = {
    "dram__bytes_read.sum": "dram_read_bytes",
    "dram__bytes_write.sum": "dram_written_bytes",
    "lts__t_bytes.sum": "l2_bytes",
    "sm__cycles_active.sum": "sm_active_cycles",
    "sm__pipe_tensor_cycles_active_realtime.sum": "tensor_active_cycles",
}
# All traffic of a GPU goes through its second-level cache.
ANCHOR = "lts__t_bytes.sum"
# Below this share of the most that went on in a sample, nothing did.
QUIET = 0.005
# Share of the window by which the interval may be off: on an H200, 0.0001 in 21 ms.
DRIFT = 0.001
# Distance of tried places as shares of an interval: first, and at last.
COARSE, FINE = 4, 50
MOST_PLACES = 400


class Sampled(msgspec.Struct):
    """The content of counters.json."""

    device: int = 0
    interval_ns: int = 1
    values: dict[str, list[int]] = {}
    num_populated: int = 0
    problem: str | None = None


@dataclass(frozen=True)
class Busy:
    """When a device worked: intervals in order that never overlap."""

    start: np.ndarray
    end: np.ndarray

    def until(self, moment: np.ndarray) -> np.ndarray:
        """Return how long it had worked by each moment."""
        before = np.concatenate([[0], np.cumsum(self.end - self.start)])
        place = np.searchsorted(self.start, moment, side="right") - 1
        at = np.maximum(place, 0)
        inside = np.clip(moment - self.start[at], 0, (self.end - self.start)[at])
        return np.where(place < 0, 0, before[at] + inside)

    def without_edges(self, worked_ns: int) -> tuple[int, int]:
        """Return when it had worked so long, and when so much was left: at most half of all."""
        length = self.end - self.start
        done = np.cumsum(length)
        edge = min(worked_ns, int(done[-1]) // 2)
        first = int(np.searchsorted(done, edge))
        last = int(np.searchsorted(done, done[-1] - edge))
        begin = self.end[first] - (done[first] - edge)
        return int(begin), int(self.end[last] - (done[last] - (done[-1] - edge)))


def with_samples(trace: Trace, part: Path) -> Trace:
    """Add what a process sampled to the samples of its trace, where it lies beside that.

    Samples are laid out by their order and interval, and anchored on when the device worked.
    """
    path = part / FILE
    if not path.is_file():
        return trace
    try:
        sampled = msgspec.json.decode(path.read_bytes(), type=Sampled)
    except (OSError, *UNREADABLE) as error:
        return _without(trace, f"{FILE} cannot be read: {error}")
    if sampled.problem is not None:
        why = f"Counters were not sampled: {sampled.problem}."
        return _noted(trace, Caveat("no_counters", why))
    mine = (trace.kernels["device"] == sampled.device).to_numpy(bool)
    busy = busy_of(trace.kernels[mine])
    found = place(np.array(sampled.values.get(ANCHOR, []), dtype=np.float64), sampled, busy)
    if isinstance(found, str):
        return _without(trace, found)
    rows = _rows(sampled, found)
    both = pd.concat([trace.samples, rows], ignore_index=True)
    samples = both.astype({c.name: c.dtype for c in columns_of("samples", "reader")})
    caveat = (
        f"Counters were sampled every {sampled.interval_ns / 1000:g} µs, and placed in time by "
        "when the GPU worked: what is shorter shares a sample with its neighbours."
    )
    if lost := sampled.num_populated - len(sampled.values.get(ANCHOR, [])):
        caveat += f" Samples that CUPTI did not complete: {lost:,}."
    return _noted(replace(trace, samples=samples), Caveat("sampled_counters", caveat))


def _without(trace: Trace, why: str) -> Trace:
    told = f"Counters were sampled, but are left out: {why}."
    return _noted(trace, Caveat("counters_left_out", told))


def _noted(trace: Trace, caveat: Caveat) -> Trace:
    return replace(trace, meta=replace(trace.meta, caveats=(*trace.meta.caveats, caveat)))


def busy_of(kernels: pd.DataFrame) -> Busy:
    """Return the union of the activities."""
    start = kernels["start_ns"].to_numpy(np.int64)
    end = start + kernels["duration_ns"].to_numpy(np.int64)
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    covered = np.concatenate([start[:1], np.maximum.accumulate(end)[:-1]])
    begin = np.maximum(start, covered)
    return Busy(begin[end > begin], end[end > begin])


def place(activity: np.ndarray, sampled: Sampled, busy: Busy) -> float | str:
    """Return when the first sample began, or why that is unknown.

    What is decided first is whether both can be the same work. Samples show it from the first to
    the last in which anything went on, up to an interval too early and too late. And they may
    miss its edges: less than an interval's work in all may leave no trace. Where it lies between
    is decided by the least squares between the samples, as shares of what is usual, and the time
    worked in each.
    """
    activity = activity.copy()
    # It holds what went on since the counters were set up.
    activity[:1] = 0
    highest = float(activity.max()) if len(activity) else 0.0
    active = np.flatnonzero(activity > QUIET * highest)
    if not len(active) or not len(busy.start):
        return "counters and activities never show the device at work together"
    interval, window = sampled.interval_ns, int(busy.end[-1] - busy.start[0])
    seen = int(active[-1] + 1 - active[0]) * interval
    begin, end = busy.without_edges(interval)
    drift = DRIFT * window
    if seen - 2 * interval > window + drift or seen < end - begin - drift:
        return (
            f"the device worked for {seen / 1e6:.2f} ms by the counters and for "
            f"{window / 1e6:.2f} ms by the recording"
        )
    level = np.minimum(activity / float(np.percentile(activity[active], 95)), 1)
    edges = np.arange(len(activity) + 1) * interval

    def misfit(first: float) -> float:
        worked = np.diff(busy.until(first + edges)) / interval
        return float(((level - worked) ** 2).sum())

    to_first = float(active[0] * interval)
    low, high = busy.start[0] - interval - drift - to_first, begin + drift - to_first
    step = max(interval / COARSE, (high - low) / MOST_PLACES)
    first = min(np.arange(low, high + step, step).tolist(), key=misfit)
    while step > interval / FINE:
        step /= COARSE
        near = [first + i * step for i in range(-COARSE, COARSE + 1)]
        first = min(near, key=misfit)
    return float(first)


def _rows(sampled: Sampled, first_ns: float) -> pd.DataFrame:
    parts = []
    for name, quantity in QUANTITIES.items():
        # The first holds what went on since the counters were set up.
        values = np.array(sampled.values.get(name, []), dtype=np.float64)[1:]
        moments = first_ns + np.arange(1, len(values) + 1) * sampled.interval_ns
        parts.append(
            pd.DataFrame(
                {
                    "time_ns": np.rint(moments).astype(np.int64),
                    "rank": np.int32(0),
                    "device": np.int32(sampled.device),
                    "source": "counters",
                    "quantity": quantity,
                    "value": values,
                }
            )
        )
    rows: pd.DataFrame = pd.concat(parts, ignore_index=True)
    return rows
