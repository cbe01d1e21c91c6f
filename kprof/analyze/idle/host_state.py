"""The host's state at every moment, as layers of evidence over the timeline of a thread."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from kprof.analyze.attribution.call_tree import nearest
from kprof.analyze.attribution.steps import step_rows
from kprof.analyze.idle import causes
from kprof.analyze.intervals import NOTHING, Intervals, Painting, disjoint, paint
from kprof.trace import Trace, once_per_trace

# From the weakest evidence to the strongest: a call that blocks says more than the operator in it.
# "others" are the other threads that launch work, asked where the launching thread shows nothing.
LAYERS = (
    *("step", "others ran", "others loaded", "others blocked"),
    *("ran", "loaded kernels", "profiler", "waited", "loaded", "blocked"),
)
CAUSE_OF_LAYER = {
    "others loaded": causes.DATA_LOADING,
    "loaded": causes.DATA_LOADING,
    "profiler": causes.PROFILER,
    "waited": causes.NO_WORK,
}


@dataclass(frozen=True)
class Host:
    """The host's ranges, sorted out by what they prove."""

    trace: Trace
    blocking: pd.Series[Any]
    """Cause that each blocking call proves, by its row in `ranges`."""

    @cached_property
    def start(self) -> np.ndarray:
        """Starts of all ranges."""
        return np.asarray(self.trace.ranges["start_ns"], dtype=np.int64)

    @cached_property
    def end(self) -> np.ndarray:
        """Ends of all ranges."""
        return np.asarray(self.start + self.trace.ranges["duration_ns"], dtype=np.int64)

    @cached_property
    def thread(self) -> np.ndarray:
        """Thread of each range; threads of two ranks may have the same number."""
        return self.trace.ranges["thread"].to_numpy(np.int64)

    @cached_property
    def rank(self) -> np.ndarray:
        """Rank of each range."""
        return self.trace.ranges["rank"].to_numpy(np.int64)

    @cached_property
    def rows(self) -> dict[str, np.ndarray]:
        """Rows of `ranges` that are evidence of a kind."""
        ranges = self.trace.ranges
        overhead = matching(ranges, "overhead", r"")
        drivers = matching(ranges, "overhead", causes.DRIVERS_OWN)
        return {
            "step": step_rows(ranges),
            "ran": _outermost(ranges),
            "loaded kernels": np.union1d(
                matching(ranges, "overhead", causes.LOADING_OF_KERNELS),
                first_launches(self.trace),
            ),
            "profiler": np.setdiff1d(overhead, drivers),
            "waited": np.concatenate(
                [
                    matching(ranges, "python", causes.WAITING_FUNCTION),
                    matching(ranges, "system", causes.WAITING_CALL),
                ]
            ),
            "loaded": np.concatenate(
                [
                    matching(ranges, "phase", r"^data$"),
                    matching(ranges, "python", causes.LOADING_FUNCTION),
                    matching(ranges, "range", causes.LOADING_RANGE),
                    matching(ranges, "op", causes.LOADING_RANGE),
                ]
            ),
            "blocked": self.blocking.index.to_numpy(np.int64),
        }

    @cached_property
    def launching(self) -> set[tuple[int, int]]:
        """Threads, as (rank, thread), that launch work or carry the phases of a step."""
        launch = self.trace.kernels["launch_row"].dropna().to_numpy(np.int64)
        phases = np.flatnonzero((self.trace.ranges["kind"] == "phase").to_numpy(bool))
        rows = np.concatenate([np.unique(launch), self.rows["step"], phases])
        return set(threads_in(self.rank[rows], self.thread[rows]))

    def waits(self) -> Intervals:
        """Return when a launching thread was blocked in a call or waited for data."""
        rows = np.unique(np.concatenate([self.rows["blocked"], self.rows["loaded"]]))
        pairs = zip(self.rank[rows].tolist(), self.thread[rows].tolist(), strict=True)
        rows = rows[np.array([pair in self.launching for pair in pairs], dtype=bool)]
        return Intervals(self.start[rows], self.end[rows], rows)

    def union(self, kind: str, rank: int, threads: set[int] | None = None) -> Intervals:
        """Return when rows of this kind were open on these threads of a rank; None: on all."""
        rows = self.rows[kind]
        rows = rows[self.rank[rows] == rank]
        if threads is not None:
            rows = rows[np.isin(self.thread[rows], list(threads))]
        return disjoint(Intervals(self.start[rows], self.end[rows], rows))

    def paint(self, rank: int, thread: int) -> Painting:
        """Paint what `thread` did, and where it shows nothing, what the rank's others did."""
        own = {thread}
        others = {t for r, t in self.launching if r == rank} - own
        layers = {
            "step": self.union("step", rank),
            "loaded kernels": self.union("loaded kernels", rank),
            "profiler": self.union("profiler", rank),
        }
        for kind in ("ran", "loaded", "blocked"):
            layers[kind] = self.union(kind, rank, own)
            layers[f"others {kind}"] = self.union(kind, rank, others)
        layers["waited"] = self.union("waited", rank, own)
        return paint([layers[name] for name in LAYERS])


@once_per_trace
def find_host(trace: Trace) -> Host:
    """Sort the host's ranges out; the trace has been attributed."""
    return Host(trace, _blocking_calls(trace))


def threads_in(rank: np.ndarray, thread: np.ndarray) -> list[tuple[int, int]]:
    """Return the distinct pairs of rank and thread, or of any two numbers, in order."""
    # Neighbours are mostly of one thread.
    is_new = np.append(True, (np.diff(rank) != 0) | (np.diff(thread) != 0))[: len(rank)]
    return sorted(set(zip(rank[is_new].tolist(), thread[is_new].tolist(), strict=True)))


def matching(ranges: pd.DataFrame, kind: str, pattern: str) -> np.ndarray:
    """Return the rows of a kind whose name matches."""
    names = ranges["name"].cat
    rows = np.flatnonzero((ranges["kind"] == kind).to_numpy(bool))
    codes = names.codes.to_numpy()[rows]
    rows, codes = rows[codes >= 0], codes[codes >= 0]
    if not len(rows):
        return rows
    # Most names are those of other kinds.
    used = np.unique(codes)
    is_match = np.zeros(len(names.categories), dtype=bool)
    is_match[used] = np.asarray(names.categories[used].str.contains(pattern), dtype=bool)
    return np.asarray(rows[is_match[codes]])


# A call that launches a kernel, where no other of the recording tells: a median of 4 to 7 µs on
# H200, H100 and B200.
LAUNCH_CALL_NS = 7_000


def first_launches(trace: Trace) -> np.ndarray:
    """Return the calls in which the driver loaded the kernel that they launched.

    They are the first of their kernel, take many times as long as the launches after it, and no
    later one of the same kernel takes half as long.
    """
    kernels, ranges = trace.kernels, trace.ranges
    row = kernels["launch_row"].to_numpy(np.int64, na_value=NOTHING)
    chosen = np.flatnonzero(np.isin(row, matching(ranges, "runtime", causes.LAUNCHING_CALL)))
    took = ranges["duration_ns"].to_numpy(np.int64)[row[chosen]]
    calls = pd.DataFrame(
        {
            "rank": kernels["rank"].to_numpy(np.int64)[chosen],
            "name": kernels["name"].cat.codes.to_numpy()[chosen],
            "begin": ranges["start_ns"].to_numpy(np.int64)[row[chosen]],
            "took": took,
            "row": row[chosen],
        }
    ).sort_values("begin", kind="stable")
    of_kernel = calls.groupby(["rank", "name"], sort=False)
    is_first = of_kernel.cumcount() == 0
    later = calls[~is_first].groupby(["rank", "name"])["took"].max()
    usual = calls[~is_first].groupby("rank")["took"].median()
    first = calls[is_first].join(later.rename("later"), on=["rank", "name"])
    usual_ns = first["rank"].map(usual).fillna(LAUNCH_CALL_NS)
    loads = first["took"] >= causes.LOADING_TIMES_A_LAUNCH * usual_ns
    loads &= ~(2 * first["later"] > first["took"])
    return np.asarray(np.unique(first["row"][loads]), dtype=np.int64)


def _outermost(ranges: pd.DataFrame) -> np.ndarray:
    """Return the outermost ranges within the steps: when any is open, the thread runs something."""
    kind = ranges["kind"]
    is_step = (kind == "step").to_numpy(bool)
    parent = ranges["parent"].to_numpy(np.int64, na_value=NOTHING)
    is_top = (parent == NOTHING) | is_step[parent]
    return np.flatnonzero(is_top & ~kind.isin(["step", "python", "overhead"]).to_numpy(bool))


def _blocking_calls(trace: Trace) -> pd.Series[Any]:
    """Return the calls that block the host, with the cause that each proves.

    A wait in the operator of a pageable upload belongs to that upload where the operator launched
    nothing else in between.
    """
    ranges, kernels = trace.ranges, trace.kernels
    found: dict[int, str] = {}
    for pattern, cause in (
        (causes.ALLOCATING_CALL, causes.ALLOCATOR),
        (causes.SYNCHRONIZING_CALL, causes.SYNCHRONIZATION),
    ):
        found.update(dict.fromkeys(matching(ranges, "runtime", pattern).tolist(), cause))
    uploads = _launched(kernels, causes.PAGEABLE_UPLOAD)
    found.update(
        dict.fromkeys(_launched(kernels, causes.PAGEABLE_DOWNLOAD), causes.SYNCHRONIZATION)
    )
    parent = ranges["parent"].to_numpy(np.int64, na_value=NOTHING)
    waits = [row for row, cause in found.items() if cause == causes.SYNCHRONIZATION]
    for row in _waits_after(trace, parent, uploads, waits):
        found[row] = causes.PAGEABLE_COPY
    found.update(dict.fromkeys(uploads, causes.PAGEABLE_COPY))
    calls = np.array(sorted(found), dtype=np.int64)
    among_ranks = np.zeros(len(ranges), dtype=bool)
    for kind in ("op", "range"):
        among_ranks[matching(ranges, kind, causes.BLOCKING_COLLECTIVE)] = True
    of_ranks = nearest(parent[calls], parent, among_ranks) != NOTHING
    found.update(dict.fromkeys(calls[of_ranks].tolist(), causes.COLLECTIVE_WAIT))
    return pd.Series([found[row] for row in calls.tolist()], index=calls, dtype=object)


def _waits_after(
    trace: Trace, parent: np.ndarray, uploads: list[int], waits: list[int]
) -> list[int]:
    """Return the waits before which their operator launched one of `uploads` last."""
    is_op = (trace.ranges["kind"] == "op").to_numpy(bool)
    start = trace.ranges["start_ns"].to_numpy(np.int64)
    uploading = {int(parent[row]) for row in uploads if is_op[parent[row]]} - {NOTHING}
    launched: dict[int, list[tuple[int, int]]] = {one: [] for one in uploading}
    rows = np.unique(trace.kernels["launch_row"].dropna().to_numpy(np.int64))
    for row in rows[np.isin(parent[rows], list(uploading))].tolist():
        launched[int(parent[row])].append((int(start[row]), row))
    for one in launched.values():
        one.sort()
    are_uploads, found = set(uploads), []
    for row in waits:
        before = launched.get(int(parent[row]), [])
        place = bisect_right(before, (int(start[row]), row))
        if place and before[place - 1][1] in are_uploads:
            found.append(row)
    return found


def _launched(kernels: pd.DataFrame, pattern: str) -> list[int]:
    """Return the calls that launched activities of such a name."""
    name = kernels["name"].cat
    matches = np.append(np.asarray(name.categories.str.contains(pattern), dtype=bool), False)
    rows = kernels["launch_row"][matches[name.codes.to_numpy()]].dropna()
    return sorted(set(rows.to_numpy(np.int64).tolist()))
