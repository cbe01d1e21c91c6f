"""Idle time: every nanosecond in which a device did nothing, under exactly one cause."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from kprof.analyze.idle import causes
from kprof.analyze.idle.droughts import add_drain, add_droughts
from kprof.analyze.idle.gaps import between_kernels_ns, find_gaps, find_launches
from kprof.analyze.idle.host_state import find_host
from kprof.analyze.idle.pieces import CODES, Evidence, Pieces, split_gaps
from kprof.analyze.idle.places import Places, find_places
from kprof.analyze.intervals import NOTHING
from kprof.analyze.overlap import rows_by
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
        pieces = add_droughts(evidence, pieces)
        if trace.meta.recording is not None:
            pieces = add_drain(evidence, pieces)
    places = find_places(evidence, pieces)
    idle = _table(evidence, pieces, places)
    trace = trace.with_kernels(gap_before_ns=_gaps_before(trace.kernels))
    cause = _causes_of_gaps(trace.kernels, idle)
    return replace(trace.with_kernels(gap_cause=cause), idle=idle)


def _unknown(trace: Trace) -> Trace:
    """Return a trace in which nobody knows of idle time, since nobody knows what ran when."""
    number = len(trace.kernels)
    nobody_knows = np.full(number, NOTHING, dtype=np.int64)
    causes_of_gaps = pd.Categorical.from_codes(nobody_knows, CAUSES)
    known = trace.with_kernels(gap_before_ns=_nullable(nobody_knows), gap_cause=causes_of_gaps)
    return replace(known, idle=empty("idle", "idle"))


def _table(evidence: Evidence, pieces: Pieces, places: Places) -> pd.DataFrame:
    gaps, gap = evidence.gaps, pieces.gap
    columns: dict[str, object] = {
        "rank": gaps.rank[gap],
        "device": gaps.device[gap],
        "start_ns": pieces.start,
        "duration_ns": pieces.end - pieces.start,
        "cause": pd.Categorical.from_codes(pieces.cause, CAUSES),
        "recoverable_ns": _recoverable_ns(evidence, pieces),
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


def _recoverable_ns(evidence: Evidence, pieces: Pieces) -> pd.arrays.IntegerArray:
    """Return what would be gained without each piece's cause.

    Any two activities need some time between them, so a gap's last piece keeps that.
    """
    gap = pieces.gap
    is_last = np.append(gap[1:] != gap[:-1], True)[: len(gap)]
    ends_with_activity = is_last & (evidence.gaps.row[gap] != NOTHING)
    kept_ns = np.where(ends_with_activity, evidence.floor_ns // 2, 0)
    gained_ns = np.maximum(pieces.end - pieces.start - kept_ns, 0)
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
    inside = idle[(idle["kernel_row"].notna() & idle["edge"].isna()).to_numpy(bool)]
    longest = inside.sort_values("duration_ns", kind="stable").drop_duplicates(
        "kernel_row", keep="last"
    )
    codes = np.full(len(kernels), NOTHING, dtype=np.int64)
    codes[longest["kernel_row"].to_numpy(np.int64)] = longest["cause"].cat.codes.to_numpy()
    # What a device waited for its first activity is no gap between two.
    has_gap = kernels["gap_before_ns"].notna().to_numpy(bool)
    return pd.Categorical.from_codes(np.where(has_gap, codes, NOTHING), CAUSES)
