"""Joins of activities to the calls that launched them, where ids or rows come twice.

A file that several recordings or exports were put into holds rows twice, or gives one id to several
calls. Here each call gets an id of its own, and each activity that of its call, by time.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pandas as pd

from kprof.collect.readers.kineto.events import MISSING
from kprof.collect.readers.kineto.joins import EMPTY_IDS, MANY, NO_ROW, Numbers, has_twice
from kprof.collect.readers.kineto.joins import last_before as last_call_before
from kprof.collect.readers.table_columns import nullable

_PLACE = ["name", "rank", "start_ns", "duration_ns", "correlation"]
# What two rows of one activity, call or range have in common.
_OF_ACTIVITY = [*_PLACE, "activity", "device", "stream", "graph_node"]
_OF_CALL = [*_PLACE, "kind", "thread"]
_OF_RANGE = [*_OF_CALL, "sequence", "input_shapes"]


def settle(
    kernels: pd.DataFrame, ranges: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame, Counter[str]]:
    """Leave out rows that stand twice, and give ids that join; return what was counted, too."""
    counts: Counter[str] = Counter()
    kernels, ranges = _without_copies(kernels, ranges, counts)
    of_calls, of_activities = _ids(ranges), _ids(kernels)
    rank = ranges["rank"].to_numpy(np.int64)
    is_call = _are_calls(ranges) & (of_calls != MISSING)
    empty = [one for one in EMPTY_IDS if np.count_nonzero(of_calls[is_call] == one) > 1]
    is_empty = np.isin(of_calls, empty) & is_call
    is_call &= ~is_empty
    calls = np.flatnonzero(is_call)
    # Ranks and ids as one number.
    ids, code = np.unique(np.append(of_calls[calls], of_activities), return_inverse=True)
    key = code + len(ids) * np.append(rank[calls], kernels["rank"].to_numpy(np.int64))
    of_call, of_activity = key[: len(calls)], key[len(calls) :]
    known = np.sort(of_call)
    reused = np.unique(known[1:][known[1:] == known[:-1]])
    if not len(reused) and not empty:
        return kernels, ranges, counts
    counts["reused_ids"] = len(reused)
    start_ns = ranges["start_ns"].to_numpy(np.int64)[calls]
    asked = np.flatnonzero(np.isin(of_activity, reused))
    found = last_call_before(
        of_call,
        start_ns,
        of_activity[asked],
        kernels["start_ns"].to_numpy(np.int64)[asked],
        is_valid=np.ones(len(calls), dtype=bool),
    )
    is_reused = np.flatnonzero(np.isin(of_call, reused))
    own = of_calls[calls]
    own[is_reused] = max(int(ids.max(initial=0)), 0) + 1 + np.arange(len(is_reused))
    of_calls[calls], of_calls[is_empty] = own, MISSING
    of_activities[np.isin(of_activities, empty)] = MISSING
    of_activities[asked] = np.where(found == NO_ROW, MISSING, np.append(own, MISSING)[found])
    return (
        kernels.assign(correlation=nullable(of_activities)),
        ranges.assign(correlation=nullable(of_calls)),
        +counts,
    )


def _without_copies(
    kernels: pd.DataFrame, ranges: pd.DataFrame, counts: Counter[str]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Keep one of the rows that are equal; of ranges without an id only where most others are."""
    is_call = _are_calls(ranges)
    is_copy = {
        "kernels": _copies(kernels, _OF_ACTIVITY),
        "calls": np.zeros(len(ranges), dtype=bool),
        "ranges": np.zeros(len(ranges), dtype=bool),
    }
    is_copy["calls"][is_call] = _copies(ranges[is_call], _OF_CALL)
    num_copies = is_copy["kernels"].sum() + is_copy["calls"].sum()
    if num_copies and num_copies >= MANY * 0.5 * (len(kernels) + is_call.sum()):
        is_copy["ranges"][~is_call] = _copies(ranges[~is_call], _OF_RANGE)
    if not (number := int(sum(of.sum() for of in is_copy.values()))):
        return kernels, ranges
    counts["copied_events"] = number
    is_range = ~(is_copy["calls"] | is_copy["ranges"])
    kept = kernels[~is_copy["kernels"]].reset_index(drop=True)
    return kept, ranges[is_range].reset_index(drop=True)


def _copies(table: pd.DataFrame, same: list[str]) -> np.ndarray:
    """Tell which rows are equal to one before them."""
    if not has_twice(table["start_ns"].to_numpy(np.int64), _ids(table)):
        return np.zeros(len(table), dtype=bool)
    return np.asarray(table.duplicated(same).to_numpy(bool))


def _are_calls(ranges: pd.DataFrame) -> np.ndarray:
    return np.asarray((ranges["kind"] == "runtime").to_numpy(bool))


def _ids(table: pd.DataFrame) -> Numbers:
    return np.array(table["correlation"].to_numpy(np.int64, na_value=MISSING))
