"""The table of idle time: each nanosecond of it under exactly one cause, with its place."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from kprof.analyze.attribution.call_tree import nearest, parents
from kprof.analyze.attribution.overlap import rows_by
from kprof.analyze.idle import causes
from kprof.analyze.idle.gaps import (
    CODES,
    LATE,
    Evidence,
    Pieces,
    between_kernels_ns,
    find_gaps,
    find_launches,
    split_gaps,
)
from kprof.analyze.idle.host_state import Host, find_host, threads_in
from kprof.analyze.idle.queue_starvation import add_drain, add_starvation
from kprof.analyze.intervals import NOTHING
from kprof.trace import Trace, columns_of, empty

CAUSES = pd.Index(causes.CAUSES)
EDGES = pd.Index(["before", "after"])


def add_idle(trace: Trace) -> Trace:
    """Add the idle time in pieces with their causes, and to each activity the gap before it.

    The pieces of a device never overlap and add up to its idle time. The cause of a gap is that of
    its longest part.
    """
    if not trace.has_timeline:
        return _unknown(trace)
    gaps, launch = find_gaps(trace), find_launches(trace)
    floor_ns = between_kernels_ns(gaps, launch)
    evidence = Evidence(trace, gaps, launch, find_host(trace), floor_ns)
    pieces = split_gaps(evidence)
    if not trace.is_host_only:
        pieces = add_starvation(evidence, pieces)
        if trace.meta.recording is not None:
            pieces = add_drain(evidence, pieces)
    places = find_places(evidence, pieces)
    idle = _table(evidence, pieces, places)
    trace = trace.with_kernels(gap_before_ns=_gaps_before(trace.kernels))
    cause = _causes_of_gaps(trace.kernels, idle)
    return replace(trace.with_kernels(gap_cause=cause), idle=idle)


def _unknown(trace: Trace) -> Trace:
    """Return a trace without known idle time, since its timeline is unknown."""
    number = len(trace.kernels)
    unknown = np.full(number, NOTHING, dtype=np.int64)
    causes_of_gaps = pd.Categorical.from_codes(unknown, CAUSES)
    known = trace.with_kernels(gap_before_ns=_nullable(unknown), gap_cause=causes_of_gaps)
    return replace(known, idle=empty("idle", "idle"))


def _table(evidence: Evidence, pieces: Pieces, places: Places) -> pd.DataFrame:
    gaps, gap = evidence.gaps, pieces.gap
    columns: dict[str, object] = {
        "rank": gaps.rank[gap],
        "device": gaps.device[gap],
        "start_ns": pieces.start,
        "duration_ns": pieces.end - pieces.start,
        "cause": pd.Categorical.from_codes(pieces.cause, CAUSES),
        "recoverable_ns": _recoverable_ns(pieces),
        "edge": pd.Categorical.from_codes(gaps.edge[gap] - 1, EDGES),
        "kernel_row": _nullable(gaps.row[gap]),
        "evidence_row": _nullable(places.row),
        "place": places.place,
        "module": places.module,
        "line": places.line,
    }
    declared = {column.name: column.dtype for column in columns_of("idle", "idle")}
    frame = pd.DataFrame({name: columns[name] for name in declared})
    table: pd.DataFrame = frame.astype(declared)
    return table


def _recoverable_ns(pieces: Pieces) -> pd.arrays.IntegerArray:
    """Return what would be gained without each piece's cause, at most: all of it, or nothing."""
    gained_ns = pieces.end - pieces.start
    nothing = [CODES[cause] for cause in causes.NOT_RECOVERABLE]
    gained_ns = np.where(np.isin(pieces.cause, nothing), 0, gained_ns)
    known = [*nothing, *(CODES[cause] for cause in causes.RECOVERABLE)]
    return pd.arrays.IntegerArray(gained_ns, ~np.isin(pieces.cause, known))


def _nullable(values: np.ndarray) -> pd.arrays.IntegerArray:
    return pd.arrays.IntegerArray(values.astype(np.int64), values == NOTHING)


def _gaps_before(kernels: pd.DataFrame) -> pd.arrays.IntegerArray:
    """Return the time before each activity in which nothing ran on its device."""
    start = kernels["start_ns"].to_numpy()
    end = start + kernels["duration_ns"].to_numpy()
    gap = np.zeros(len(kernels), dtype=np.int64)
    is_first = np.zeros(len(kernels), dtype=bool)
    for rows in rows_by(kernels, "rank", "device"):
        covered_to = np.maximum.accumulate(end[rows])
        gap[rows[1:]] = np.maximum(start[rows[1:]] - covered_to[:-1], 0)
        is_first[rows[0]] = True
    return pd.arrays.IntegerArray(gap, is_first)


def _causes_of_gaps(kernels: pd.DataFrame, idle: pd.DataFrame) -> pd.Categorical:
    """Return the cause of the longest part of the gap before each activity."""
    row = idle["kernel_row"].to_numpy(np.int64, na_value=NOTHING)
    inside = np.flatnonzero((row != NOTHING) & idle["edge"].isna().to_numpy(bool))
    # Of several parts of a gap the longest is written last.
    inside = inside[np.argsort(idle["duration_ns"].to_numpy(np.int64)[inside], kind="stable")]
    codes = np.full(len(kernels), NOTHING, dtype=np.int64)
    codes[row[inside]] = idle["cause"].cat.codes.to_numpy()[inside]
    # A device's wait for its first activity is not a gap between two.
    has_gap = kernels["gap_before_ns"].notna().to_numpy(bool)
    return pd.Categorical.from_codes(np.where(has_gap, codes, NOTHING), CAUSES)


# A function of a file, as torch's profiler names it, and what is Python's or torch's own.
FUNCTION = re.compile(r"\.py\(\d+\): ")
NOT_THE_WORKLOADS = re.compile(
    r"site-packages|dist-packages|^torch/|/torch/|^<|kprof_recorder|sitecustomize"
    r"|^(?:abc|contextlib|copy|functools|inspect|queue|selectors|threading|typing)\.py"
    r"|^(?:asyncio|collections|concurrent|encodings|importlib|json|logging|multiprocessing)/"
)


@dataclass(frozen=True)
class Places:
    """For each piece, its evidence in `ranges` and the names around it."""

    row: np.ndarray
    place: pd.Categorical
    module: pd.Categorical
    line: pd.Categorical


def find_places(evidence: Evidence, pieces: Pieces) -> Places:
    """Find where each piece's cause lies.

    Where a call proves the cause, that call's operator; where the host was merely late, what ran
    on its thread in the middle of the piece.
    """
    host, ranges = evidence.host, evidence.trace.ranges
    if not len(ranges):
        nothing = np.full(len(pieces.row), NOTHING)
        return Places(nothing, *(_names(ranges, nothing) for _ in range(3)))
    parent = ranges["parent"].to_numpy(np.int64, na_value=NOTHING)
    is_late = pieces.cause == LATE
    middle = pieces.start + (pieces.end - pieces.start) // 2
    of_thread = evidence.thread_row()[pieces.gap]
    is_telling = ranges["kind"].isin(["op", "system", "module", "range", "phase", "step"])
    tells = np.flatnonzero(is_telling)
    running = innermost(host, tells, parent, np.where(is_late, of_thread, NOTHING), middle)
    row = np.where(is_late & (running != NOTHING), running, pieces.row)
    # A wait is asked about where it began: how the host got there.
    asks = is_late | (row == NOTHING)
    thread, moment = np.where(asks, of_thread, row), np.where(asks, middle, host.start[row])
    # The device's own delay has no place on the host.
    thread = np.where(pieces.cause == CODES[causes.BETWEEN_KERNELS], NOTHING, thread)
    is_module = (ranges["kind"] == "module").to_numpy(bool)
    return Places(
        row,
        _names(ranges, _named(ranges, parent, row)),
        _names(ranges, nearest(row, parent, is_module)),
        _names(ranges, _workloads_function(host, thread, moment)),
    )


def _named(ranges: pd.DataFrame, parent: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Return what to name: the operator around a call, or the call itself; no step."""
    kind = ranges["kind"]
    is_call = np.append(kind.isin(["runtime", "system"]).to_numpy(bool), False)
    is_step = np.append((kind == "step").to_numpy(bool), False)
    tells = kind.isin(["op", "module", "range", "phase"]).to_numpy(bool)
    around = nearest(
        np.where(is_call[row], np.append(parent, NOTHING)[row], NOTHING), parent, tells
    )
    named = np.where(around == NOTHING, row, around)
    return np.where(is_step[named], NOTHING, named)


def _workloads_function(host: Host, thread: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """Return the innermost Python function of the workload itself at each moment on a thread."""
    ranges = host.trace.ranges
    rows = np.flatnonzero((ranges["kind"] == "python").to_numpy(bool))
    if not len(rows):
        return np.full(len(thread), NOTHING)
    parent = parents(ranges, rows)
    names = [str(name) for name in ranges["name"].cat.categories]
    is_own = [bool(FUNCTION.search(n)) and not NOT_THE_WORKLOADS.search(n) for n in names]
    wanted = np.append(np.array(is_own, dtype=bool), False)[ranges["name"].cat.codes.to_numpy()]
    return nearest(innermost(host, rows, parent, thread, moment), parent, wanted)


def innermost(
    host: Host, rows: np.ndarray, parent: np.ndarray, thread: np.ndarray, moment: np.ndarray
) -> np.ndarray:
    """Return which of `rows` was open innermost at each moment on a thread, or `NOTHING`.

    `thread` holds rows of `ranges` on the thread that is asked about, or `NOTHING`.
    """
    result = np.full(len(moment), NOTHING, dtype=np.int64)
    asked = np.flatnonzero(thread != NOTHING)
    pairs = [(host.rank[of], host.thread[of]) for of in (rows, thread[asked])]
    for rank, each in threads_in(*pairs[1]):
        part = rows[(pairs[0][0] == rank) & (pairs[0][1] == each)]
        part = part[np.lexsort([-host.end[part], host.start[part]])]
        mine = asked[(pairs[1][0] == rank) & (pairs[1][1] == each)]
        at = np.searchsorted(host.start[part], moment[mine], side="right") - 1
        result[mine] = np.append(part, NOTHING)[at]
    climbing = asked[result[asked] != NOTHING]
    while len(climbing):
        climbing = climbing[host.end[result[climbing]] <= moment[climbing]]
        result[climbing] = parent[result[climbing]]
        climbing = climbing[result[climbing] != NOTHING]
    return result


def _names(ranges: pd.DataFrame, rows: np.ndarray) -> pd.Categorical:
    """Return the names of rows; that of `NOTHING` is missing."""
    names = ranges["name"].cat
    codes = np.append(names.codes.to_numpy(), NOTHING)[rows]
    column: pd.Categorical = pd.Categorical.from_codes(codes, names.categories)
    used: pd.Categorical = column.remove_unused_categories()
    return used
