"""Numbers for collectives that were recorded without any: by their order, where all ranks agree."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kprof.collect.collectives import SYMMETRIC, Run, by_order
from kprof.collect.offsets import END_SKEW_NS, END_SKEW_PART, FAR_APART, TOLERANCE_NS, ways
from kprof.trace import Trace

# One in so many matched collectives may not overlap: lost and damaged records.
ONE_IN = 20


def numbered(trace: Trace) -> Trace:
    """Return the trace with a `group_sequence` for the symmetric collectives of several ranks.

    Those that tell one keep it. Where the collectives of a rank cannot be matched with those of
    the rank with most, that rank's stay without.
    """
    kernels = trace.kernels
    if kernels["rank"].nunique() < 2:
        return trace
    names = kernels["collective"].cat
    is_symmetric = np.array([*(bool(SYMMETRIC.match(str(n))) for n in names.categories), False])
    known = is_symmetric[names.codes.to_numpy()] & kernels["group"].notna().to_numpy(bool)
    lacking = known & kernels["group_sequence"].isna().to_numpy(bool)
    if not lacking.any():
        return trace
    number = kernels["group_sequence"].to_numpy(np.int64, na_value=-1).copy()
    for group in kernels["group"][lacking].unique():
        rows = np.flatnonzero(known & (kernels["group"] == group).to_numpy(bool))
        number[rows] = _numbers(kernels.iloc[rows])
    column = pd.arrays.IntegerArray(np.maximum(number, 0), number < 0)
    return trace.with_kernels(group_sequence=column)


def _numbers(rows: pd.DataFrame) -> NDArray[np.int64]:
    """Return the number of each collective of a group; -1 where it matches none."""
    rank, start = (rows[c].to_numpy(np.int64) for c in ("rank", "start_ns"))
    of_rank = {one: _in_order(np.flatnonzero(rank == one), start) for one in np.unique(rank)}
    number = np.full(len(rows), -1, dtype=np.int64)
    longest = max(of_rank.values(), key=len)
    reference = _run(rows, longest)
    for places in of_rank.values():
        matched = _matched(reference, _run(rows, places))
        if matched is not None:
            number[places] = matched
    return number


def _in_order(places: NDArray[np.intp], start: NDArray[np.int64]) -> NDArray[np.intp]:
    return places[np.argsort(start[places], kind="stable")]


def _run(rows: pd.DataFrame, places: NDArray[np.intp]) -> Run:
    """Return the collectives at these places; their number stands for their place among them."""
    mine = rows.iloc[places]
    start = mine["start_ns"].to_numpy(np.int64)
    end = start + mine["duration_ns"].to_numpy(np.int64)
    return Run(mine["collective"].to_numpy(object), np.arange(len(mine)), start, end)


def _matched(reference: Run, run: Run) -> NDArray[np.int64] | None:
    """Return which collective of the reference each one is, -1 for none; None where unclear.

    By the order in which they overlap on the ranks' common clock; else by the one order in which
    they end together on any two clocks.
    """
    best: tuple[Run, Run] | None = None
    least = np.inf
    for pair in by_order(reference, run):
        if not _overlap(*pair):
            continue
        first, second = pair
        apart = float(np.quantile(np.abs(first.end_ns - second.end_ns), 0.9))
        if apart < least:
            best, least = pair, apart
        skew = END_SKEW_NS + np.median(first.end_ns - first.start_ns) / END_SKEW_PART
        if apart <= FAR_APART * skew:
            break
    if best is None:
        unnumbered = [
            Run(one.operation, None, one.start_ns, one.end_ns) for one in (reference, run)
        ]
        found = ways(*unnumbered)
        if len(found) != 1:
            return None
        best = found[0]
    first, second = best
    matched = np.full(len(run), -1, dtype=np.int64)
    matched[np.searchsorted(run.start_ns, second.start_ns)] = np.searchsorted(
        reference.start_ns, first.start_ns
    )
    return matched


def _overlap(first: Run, second: Run) -> bool:
    """Tell whether nearly all of them were open on both ranks at one time, as they must be."""
    late, early = first.start_ns - second.end_ns, second.start_ns - first.end_ns
    is_apart = np.maximum(late, early) > TOLERANCE_NS
    return bool(is_apart.sum() <= len(first) // ONE_IN)
