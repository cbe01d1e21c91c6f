"""Overlap: which of several activities that run at once an instant belongs to.

It belongs to the one that the step would still wait for: computation before a collective before a
copy before a set. Within such a class it belongs to the one that ends last; ties go by the name of
the kind. The order in which activities began or were recorded decides nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kprof.analyze.intervals import NOTHING, Intervals, paint
from kprof.trace import Trace, once_per_tables

Int64s = NDArray[np.int64]

# From the last to the first that an instant belongs to; every other kind is computation.
CLASSES = ("set", "copy", "collective")
# Tie-breakers of activities that end together; after all of them, any activity will do.
_TIES = ("kind", "name", "op", "module", "phase")


def rows_by(kernels: pd.DataFrame, *columns: str) -> list[Int64s]:
    """Return for every rank, or every device of a rank, its rows in the order of their starts."""
    if kernels.empty:
        return []
    keys = [kernels[column].to_numpy() for column in columns]
    order = np.lexsort((kernels["start_ns"].to_numpy(), *keys))
    is_border = np.any([np.diff(key[order]) != 0 for key in keys], axis=0)
    borders = np.flatnonzero(is_border) + 1
    return [np.asarray(rows, dtype=np.int64) for rows in np.split(order, borders)]


def allot_busy_time(kernels: pd.DataFrame) -> Int64s:
    """Return for every row the time of the instants that belong to it.

    The result adds up to the busy time of the ledger: the union of each device's intervals.
    """
    allotted = np.zeros(len(kernels), dtype=np.int64)
    for rows in rows_by(kernels, "rank", "device"):
        owned = own_instants(kernels, rows)
        np.add.at(allotted, owned.row, owned.end - owned.start)
    return allotted


@once_per_tables("kernels")
def allotted_time(trace: Trace) -> Int64s:
    """Return `allot_busy_time` of all activities of a trace; read only."""
    allotted = allot_busy_time(trace.kernels)
    allotted.setflags(write=False)
    return allotted


def own_instants(kernels: pd.DataFrame, rows: Int64s) -> Intervals:
    """Return the busy time of one device as disjoint intervals, each with the row that owns it.

    `rows` are the positions of the device's activities, in the order of their starts.
    """
    start = kernels["start_ns"].to_numpy(np.int64)[rows]
    end = start + kernels["duration_ns"].to_numpy(np.int64)[rows]
    if (start[1:] >= np.maximum.accumulate(end)[:-1]).all():
        return Intervals(start, end, rows).take(end > start)
    every = Intervals(start, end, rows)
    ties = [_sorted_codes(kernels[c])[rows] for c in _TIES if c in kernels]
    precedence = np.lexsort([*(-codes for codes in reversed(ties)), end])
    place = np.empty(len(rows), dtype=np.int64)
    place[precedence] = np.arange(len(rows))
    classes = classes_of(kernels)[rows]
    layers = [
        _last_to_end(every.take(classes == one), place[classes == one])
        for one in range(len(CLASSES) + 1)
    ]
    painted = paint(layers)
    is_busy = painted.layer != NOTHING
    return Intervals(painted.edge[:-1][is_busy], painted.edge[1:][is_busy], painted.row[is_busy])


def _last_to_end(intervals: Intervals, place: Int64s) -> Intervals:
    """Return the union of intervals in order of their starts, each instant to the highest place.

    Places follow the ends, so the highest so far is that of an interval that still runs, if any
    does: each that begins with a higher one owns the time from there to the next such.
    """
    place = np.where(intervals.end > intervals.start, place, NOTHING)
    highest = np.concatenate([[NOTHING], np.maximum.accumulate(place)])[: len(place)]
    owners = intervals.take(place > highest)
    if not len(owners):
        return owners
    until = np.append(np.minimum(owners.end[:-1], owners.start[1:]), owners.end[-1])
    owned = Intervals(owners.start, until, owners.row)
    return owned.take(owned.end > owned.start)


def classes_of(kernels: pd.DataFrame) -> Int64s:
    """Return the class of every row: its place in `CLASSES`, or their number for computation.

    Before kinds are known, every activity is computation.
    """
    of = {kind: number for number, kind in enumerate(CLASSES)}
    computation = len(CLASSES)
    if "kind" not in kernels:
        return np.full(len(kernels), computation)
    kinds = kernels["kind"]
    by_code = [of.get(str(kind), computation) for kind in kinds.cat.categories]
    return np.asarray(np.array([*by_code, computation])[kinds.cat.codes.to_numpy()])


def _sorted_codes(column: pd.Series[Any]) -> Int64s:
    """Return codes of a categorical column in the order of its texts; missing ones come last."""
    texts = column.cat.categories.astype(str)
    code = np.empty(len(texts) + 1, dtype=np.int64)
    code[np.argsort(texts.to_numpy(), kind="stable")] = np.arange(len(texts))
    code[-1] = len(texts)
    return np.asarray(code[column.cat.codes.to_numpy()])
