"""Lanes of a timeline: what ran when, merged where it is too small to see."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kprof.trace import NOT_RECORDED, Trace

MAX_DEPTH = 6
"""Ranges nested deeper than this are left out."""
MAX_RANGES = 20_000
"""Limit of host ranges; beyond it, the longest are kept."""

# Shares of the timeline, from fine to coarse: shorter rows are merged with those beside them.
RESOLUTIONS = tuple(1 / parts for parts in (64_000, 16_000, 4_000, 1_000, 250))


def device_rows(trace: Trace, rank: int, start_ns: int, end_ns: int) -> pd.DataFrame:
    """Return the activities of `rank` that run between two moments, a lane for every stream.

    Columns: `lane`, `row` (position in `kernels`), `start_ns`, `end_ns`, `merged` (1: itself).
    """
    kernels = trace.kernels
    rows = _between(kernels, rank, start_ns, end_ns)
    keys = kernels[["device", "stream"]].iloc[rows]
    lane = keys.groupby(["device", "stream"]).ngroup().to_numpy(np.int64)
    pairs = sorted(set(map(tuple, keys.drop_duplicates().to_numpy().tolist())))
    names = [
        f"thread {stream}" if trace.is_host_only else queue_name(device, stream)
        for device, stream in pairs
    ]
    return _table(kernels, rows, lane, names)


def queue_name(device: int, stream: int) -> str:
    """Return the name of a stream of a device in a timeline."""
    gpu = "GPU" if device == NOT_RECORDED else f"GPU {device}"
    return gpu if stream == NOT_RECORDED else f"{gpu} stream {stream}"


def host_rows(trace: Trace, rank: int, start_ns: int, end_ns: int) -> pd.DataFrame:
    """Return phases, modules and named ranges of `rank`'s threads, a lane for every depth.

    Columns as in `device_rows`; `row` is the position in `ranges`.
    """
    ranges = trace.ranges
    kinds = ranges["kind"].cat
    wanted = np.append(kinds.categories.isin(["phase", "module", "range"]), False)
    rows = _between(ranges, rank, start_ns, end_ns)
    rows = rows[wanted[kinds.codes.to_numpy()[rows]]]
    durations = ranges["duration_ns"].to_numpy()
    if len(rows) > MAX_RANGES:
        rows = rows[np.argsort(-durations[rows], kind="stable")[:MAX_RANGES]]
    rows = rows[np.lexsort((-durations[rows], ranges["start_ns"].to_numpy()[rows]))]
    lane, names = _lanes_by_depth(ranges.iloc[rows])
    is_shallow = lane >= 0
    return _table(ranges, rows[is_shallow], lane[is_shallow], names)


def _between(table: pd.DataFrame, rank: int, start_ns: int, end_ns: int) -> NDArray[np.int64]:
    """Return the positions of the rows of `rank` that overlap [start_ns, end_ns)."""
    starts = table["start_ns"].to_numpy()
    inside = (starts < end_ns) & (starts + table["duration_ns"].to_numpy() > start_ns)
    inside &= table["rank"].to_numpy() == rank
    return np.flatnonzero(inside).astype(np.int64)


def _lanes_by_depth(ranges: pd.DataFrame) -> tuple[NDArray[np.int64], list[str]]:
    """Return the lane of each range, -1 where it lies too deep, and the names of the lanes."""
    open_until: dict[Any, list[int]] = {}
    numbers: dict[Any, int] = {}
    lanes = []
    columns = (ranges[column].tolist() for column in ("thread", "start_ns", "duration_ns"))
    for thread, start_ns, duration_ns in zip(*columns, strict=True):
        ends = open_until.setdefault(thread, [])
        number = numbers.setdefault(thread, len(numbers))
        while ends and ends[-1] <= start_ns:
            ends.pop()
        ends.append(start_ns + duration_ns)
        lanes.append(number * MAX_DEPTH + len(ends) - 1 if len(ends) <= MAX_DEPTH else -1)
    names = [
        f"host thread {number + 1}, level {depth + 1}"
        for number in numbers.values()
        for depth in range(MAX_DEPTH)
    ]
    return np.array(lanes, dtype=np.int64), names


def _table(
    source: pd.DataFrame, rows: NDArray[np.int64], lane: NDArray[np.int64], names: list[str]
) -> pd.DataFrame:
    start_ns = source["start_ns"].to_numpy(np.int64)[rows]
    table: pd.DataFrame = pd.DataFrame(
        {
            "lane": pd.Categorical.from_codes(lane, pd.Index(names, dtype=object)),
            "row": rows,
            "start_ns": start_ns,
            "end_ns": start_ns + source["duration_ns"].to_numpy(np.int64)[rows],
            "merged": 1,
        }
    )
    return table


def merge_small(rows: pd.DataFrame, span_ns: int, most: int) -> pd.DataFrame:
    """Merge what is too short to see with what is beside it, so that at most `most` rows remain.

    A merged row runs from its first start to its last end; its `row` is that of its longest
    part. If the coarsest merging leaves more than `most`, the shortest are dropped.
    """
    if len(rows) <= most:
        return rows
    length_ns = (rows["end_ns"] - rows["start_ns"]).to_numpy()
    lane = rows["lane"].cat.codes.to_numpy(np.int64) << 40
    for share in RESOLUTIONS:
        resolution_ns = max(int(span_ns * share), 1)
        is_small = length_ns < resolution_ns
        cell = lane + (rows["start_ns"].to_numpy() - int(rows["start_ns"].min())) // resolution_ns
        num_left = int((~is_small).sum()) + len(np.unique(cell[is_small]))
        if num_left <= most:
            break
    merged = _merge_cells(rows[is_small], cell[is_small], length_ns[is_small])
    both = pd.concat([rows[~is_small], merged], ignore_index=True)
    longest = (both["start_ns"] - both["end_ns"]).argsort(kind="stable")
    kept: pd.DataFrame = both.iloc[np.sort(longest.to_numpy()[:most])]
    return kept


def _merge_cells(
    rows: pd.DataFrame, cell: NDArray[np.int64], length_ns: NDArray[np.int64]
) -> pd.DataFrame:
    longest_first = np.argsort(-length_ns, kind="stable")
    cells = rows.iloc[longest_first].groupby(cell[longest_first], sort=True)
    merged: pd.DataFrame = cells.agg(
        lane=("lane", "first"),
        row=("row", "first"),
        start_ns=("start_ns", "min"),
        end_ns=("end_ns", "max"),
        merged=("merged", "sum"),
    ).astype({"lane": rows["lane"].dtype})
    return merged
