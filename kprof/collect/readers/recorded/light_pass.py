"""Joins the two passes of a recording: all times of the light one, all names of the full one.

In the light pass nothing but the device's activities and the calls into CUDA is recorded, which
slows a step little. The full pass holds operators, modules and shapes of the same steps. Activities
are paired in the order of their launches. The host's ranges are moved by one increasing function of
time, which brings each call of the full pass to the time of its counterpart: so their order, and
with it what they say of the activities, stays as recorded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.api.types import union_categoricals

from kprof.trace import LightPass, Trace

Interval = tuple[int, int]


class PassesDifferError(Exception):
    """The steps of the light pass are not those of the full one; the message says how."""


@dataclass(frozen=True)
class SameStep:
    """A step of the full pass by its row in `ranges`, and what it is in the light one."""

    row: int
    name: str
    start_ns: int
    """On the clock of the light pass."""
    end_ns: int


@dataclass(frozen=True)
class Pairs:
    """The same activities in both passes: rows of their tables `kernels`, as many of each."""

    full: NDArray[np.intp]
    light: NDArray[np.intp]


@dataclass(frozen=True)
class Moved:
    """An increasing function of time: from the clock of one recording to that of another."""

    known: NDArray[np.int64]
    moved: NDArray[np.int64]

    def __call__(self, times: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the times on the other clock: between known ones in proportion."""
        after = np.searchsorted(self.known, times, side="right")
        left = np.clip(after - 1, 0, len(self.known) - 1)
        right = np.minimum(left + 1, len(self.known) - 1)
        past = times - self.known[left]
        length = self.known[right] - self.known[left]
        is_between = (past > 0) & (length > 0)
        rate = np.divide(
            self.moved[right] - self.moved[left],
            length,
            out=np.ones(len(times)),
            where=is_between,
        )
        found: NDArray[np.int64] = self.moved[left] + np.where(
            is_between, np.rint(past * rate).astype(np.int64), past
        )
        return found


def pair(full: Trace, light: Trace) -> Pairs:
    """Pair the activities of two passes.

    By the order of the launches or, where several threads launch side by side, that on each stream.

    Raises:
        PassesDifferError: they are not the same ones in the same order.
    """
    tables = full.kernels, light.kernels
    if len(full.kernels) != len(light.kernels):
        told = f"it has {len(light.kernels):,} activities instead of {len(full.kernels):,}"
        raise PassesDifferError(told)
    names = union_categoricals([table["name"] for table in tables])
    codes = np.split(names.codes, 2)
    for keys in (("device", "stream"), ("device",)):
        orders = [_order(table, keys) for table in tables]
        facts = [codes, *([table[key].to_numpy() for table in tables] for key in keys)]
        is_other = np.any([one[orders[0]] != two[orders[1]] for one, two in facts], axis=0)
        if not is_other.any():
            return Pairs(*orders)
    place = int(is_other.argmax())
    one, two = (table["name"].iloc[o[place]] for table, o in zip(tables, orders, strict=True))
    raise PassesDifferError(f"its activity {place + 1:,} is {two} instead of {one}")


def _order(kernels: pd.DataFrame, keys: Sequence[str]) -> NDArray[np.intp]:
    """Return the rows in the order of their launches, on each device or stream by itself.

    A launch may start many, as that of a CUDA graph: then in the order of the graph's nodes.
    """
    missing = np.iinfo(np.int64).max
    within = [
        kernels[name].to_numpy(np.int64, na_value=missing) for name in ("graph_node", "correlation")
    ]
    around = [kernels[key].to_numpy() for key in reversed(keys)]
    order: NDArray[np.intp] = np.lexsort((kernels["start_ns"].to_numpy(), *within, *around))
    return order


def compared(full: Trace, light: Trace) -> LightPass:
    """Return how long the activities of the two passes took."""
    device_ns, full_ns = (int(one.kernels["duration_ns"].sum()) for one in (light, full))
    return LightPass(device_ns, full_ns)


def joined(full: Trace, light: Trace, steps: Sequence[SameStep] = ()) -> Trace:
    """Return the full pass with the times, and on the clock, of the light one.

    Raises:
        PassesDifferError: the activities of the two are not the same ones in the same order.
    """
    pairs = pair(full, light)
    marks = [(_interval(full.ranges, step.row), (step.start_ns, step.end_ns)) for step in steps]
    moved = _moved([*_calls(full, light, pairs), *marks])
    names = full.ranges["name"].astype(object)
    names.loc[[step.row for step in steps]] = [step.name for step in steps]
    is_kept = (full.ranges["kind"] != "overhead").to_numpy(bool)
    start = full.ranges["start_ns"].to_numpy(np.int64)
    end = start + full.ranges["duration_ns"].to_numpy(np.int64)
    start, end = moved(start), moved(end)
    ranges = full.ranges.assign(
        start_ns=start, duration_ns=end - start, name=names.astype("category")
    )
    # The profiler's own work is that of the pass whose times these are.
    own = light.ranges[(light.ranges["kind"] == "overhead").to_numpy(bool)]
    return replace(
        full,
        kernels=_timed(full.kernels, light.kernels, pairs),
        ranges=_appended(ranges[is_kept], own),
        samples=full.samples.assign(time_ns=moved(full.samples["time_ns"].to_numpy(np.int64))),
        meta=replace(full.meta, base_time_ns=light.meta.base_time_ns),
    )


def _interval(ranges: pd.DataFrame, row: int) -> Interval:
    start, duration = (int(ranges[name].iloc[row]) for name in ("start_ns", "duration_ns"))
    return start, start + duration


def _timed(kernels: pd.DataFrame, light: pd.DataFrame, pairs: Pairs) -> pd.DataFrame:
    """Return the activities with the times of their counterparts."""
    times = {}
    for name in ("start_ns", "duration_ns"):
        times[name] = kernels[name].to_numpy(np.int64).copy()
        times[name][pairs.full] = light[name].to_numpy(np.int64)[pairs.light]
    table: pd.DataFrame = kernels.assign(**times)
    return table


def _appended(ranges: pd.DataFrame, more: pd.DataFrame) -> pd.DataFrame:
    columns = {
        name: union_categoricals([ranges[name], more[name]])
        if isinstance(ranges[name].dtype, pd.CategoricalDtype)
        else pd.concat([ranges[name], more[name]], ignore_index=True)
        for name in ranges.columns
    }
    table: pd.DataFrame = pd.DataFrame(columns)
    return table


def _calls(full: Trace, light: Trace, pairs: Pairs) -> list[tuple[Interval, Interval]]:
    """Return the intervals of calls into CUDA that are the same in both passes.

    A launch is known by its activity; any other call by its name and place among those of its
    thread after the same launch.
    """
    keys = ["thread", "launch", "place", "name"]
    one, two = (_placed(trace, rows) for trace, rows in ((full, pairs.full), (light, pairs.light)))
    threads = _threads(one, two)
    one = one.assign(thread=[threads.get(thread, thread) for thread in one["thread"].tolist()])
    both = one.merge(two, on=keys, suffixes=("", "_light"))
    columns = (both[name].tolist() for name in ("start", "end", "start_light", "end_light"))
    return [((a, b), (c, d)) for a, b, c, d in zip(*columns, strict=True)]


def _threads(full: pd.DataFrame, light: pd.DataFrame) -> dict[int, int]:
    """Return what the light pass calls each thread that launches: its profiler may know no names.

    The thread that made most of the same launches.
    """
    is_launch = (table["place"] == 0 for table in (full, light))
    one, two = (t[["launch", "thread"]][m] for t, m in zip((full, light), is_launch, strict=True))
    both = one[one["launch"] >= 0].merge(two, on="launch", suffixes=("", "_light"))
    counts = both.groupby(["thread", "thread_light"]).size().sort_values()
    return dict(counts.index.tolist())


def _placed(trace: Trace, rows: NDArray[np.intp]) -> pd.DataFrame:
    """Return the calls into CUDA, each with the launch before it and its place after that."""
    ranges = trace.ranges[(trace.ranges["kind"] == "runtime").to_numpy(bool)]
    ranges = ranges.sort_values(["thread", "start_ns"], kind="stable")
    correlation = trace.kernels["correlation"].to_numpy(np.int64, na_value=-1)[rows]
    number_of = dict(zip(correlation[::-1].tolist(), range(len(rows))[::-1], strict=True))
    own = ranges["correlation"].to_numpy(np.int64, na_value=-1)
    numbers = pd.Series([number_of.get(one, np.nan) if one >= 0 else np.nan for one in own])
    thread = ranges["thread"].to_numpy(np.int64)
    start = ranges["start_ns"].to_numpy(np.int64)
    table: pd.DataFrame = pd.DataFrame(
        {
            "thread": thread,
            "launch": numbers.groupby(thread).ffill().fillna(-1).astype(np.int64),
            "name": ranges["name"].astype(str).to_numpy(),
            "start": start,
            "end": start + ranges["duration_ns"].to_numpy(np.int64),
        }
    )
    table["place"] = table.groupby(["thread", "launch"]).cumcount()
    return table


def _moved(pairs: Sequence[tuple[Interval, Interval]]) -> Moved:
    """Return the increasing function that keeps to as many of the pairs of intervals as can be."""
    points = sorted({(one[edge], two[edge]) for one, two in pairs for edge in (0, 1)})
    if not points:
        raise PassesDifferError("it holds no call into CUDA that the full one holds")
    kept = [points[place] for place in _longest_increasing([moved for _, moved in points])]
    known = dict(reversed(kept))
    times = sorted(known)
    return Moved(
        np.array(times, dtype=np.int64), np.array([known[t] for t in times], dtype=np.int64)
    )


def _longest_increasing(values: Sequence[int]) -> list[int]:
    """Return the places of a longest part of the values that never decreases."""
    lowest: list[int] = []
    ends: list[int] = []
    before: list[int | None] = []
    for place, value in enumerate(values):
        length = bisect_right(lowest, value)
        before.append(ends[length - 1] if length else None)
        lowest[length : length + 1] = [value]
        ends[length : length + 1] = [place]
    found = []
    last = ends[-1] if ends else None
    while last is not None:
        found.append(last)
        last = before[last]
    return found[::-1]
