"""What ranks do to one another, in a fraction of the rows, and what the time of each adds up to.

The recordings of a thousand ranks fit into no memory. What a rank does to the others is in its
collectives, in what ran beside them and in its steps; the rest of it counts by its sums.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import union_categoricals

from kprof.analyze.attribution.overlap import CLASSES, allotted_time, classes_of
from kprof.analyze.attribution.steps import find_steps, outside_steps, step_rows
from kprof.analyze.bus_bandwidth import messages
from kprof.analyze.groupings import measure_capacity
from kprof.analyze.intervals import Intervals, disjoint
from kprof.analyze.rank_layout import places
from kprof.trace import RankTotals, Trace, columns_of, once_per_trace

# Of other columns, those that say who waits for whom, and for how many bytes.
ADDED = ("step", "kind", "message")
BESIDE = "(others)"


def condensed(trace: Trace) -> Trace:
    """Return an analyzed trace with its collectives, steps and the sums of each rank alone.

    What ran beside a collective, and the first and the last activity of a rank, stay as intervals
    of one name, whose union is that of the activities: apart for computation, copies and sets, so
    that collectives are hidden as in the whole trace. What was launched in no step is left out,
    where steps are marked. The result tells of waits in collectives what the whole trace tells.
    """
    kernels = trace.kernels
    inside = np.flatnonzero(~outside_steps(trace)) if len(kernels) else np.arange(0)
    is_collective = (kernels["collective"].notna() | (kernels["kind"] == "collective")).to_numpy()
    chosen = inside[is_collective[inside]]
    told = kernels.assign(message=messages(trace))
    rows = _with_beside(told, chosen, _beside(kernels, inside, is_collective))
    ranges = trace.ranges.iloc[step_rows(trace.ranges)]
    ranges = ranges[[column.name for column in columns_of("ranges", "reader")]]
    meta = replace(
        trace.meta, compiled=(), graph_notes=(), memory=(), what_if=(), totals=rank_totals(trace)
    )
    samples = trace.samples.iloc[:0]
    return Trace(rows, ranges.reset_index(drop=True), samples, meta)


@dataclass(frozen=True)
class _Beside:
    """What ran beside collectives, as intervals; `row` shares its rank, device and step."""

    union: Intervals
    kind: str


def _beside(kernels: pd.DataFrame, inside: np.ndarray, is_collective: np.ndarray) -> list[_Beside]:
    """Return the union of all but collectives, by class, of each device and step."""
    rank, device, start, duration = (
        kernels[name].to_numpy(np.int64)[inside]
        for name in ("rank", "device", "start_ns", "duration_ns")
    )
    end = start + duration
    gpu = np.unique(np.stack([rank, device]), axis=1, return_inverse=True)[1].ravel()
    step = kernels["step"].to_numpy(np.int64, na_value=-1)[inside]
    collective, of_class = is_collective[inside], classes_of(kernels)[inside]
    found = []
    for one in np.unique(gpu):
        mine = gpu == one
        spans = _union(start, end, mine & collective)
        others = mine & ~collective
        for number, one_class in itertools.product(
            np.unique(step[mine]), np.unique(of_class[others])
        ):
            busy = _union(start, end, others & (step == number) & (of_class == one_class))
            kept = busy.take(_touch(busy, spans))
            if len(kept):
                rows = Intervals(kept.start, kept.end, inside[kept.row])
                found.append(_Beside(rows, [*CLASSES, BESIDE][one_class]))
    return found


def _union(start: np.ndarray, end: np.ndarray, chosen: np.ndarray) -> Intervals:
    rows = np.flatnonzero(chosen)
    return disjoint(Intervals(start[rows], end[rows], rows))


def _touch(busy: Intervals, spans: Intervals) -> np.ndarray:
    """Tell which intervals overlap one of the spans, or are the first or the last of all."""
    edge = np.zeros(len(busy), dtype=bool)
    edge[:1] = edge[-1:] = True
    if not len(spans):
        return edge
    place = np.searchsorted(spans.end, busy.start, side="right")
    begins = np.append(spans.start, np.iinfo(np.int64).max)
    return np.asarray(edge | (begins[place] < busy.end))


def _with_beside(kernels: pd.DataFrame, chosen: np.ndarray, beside: list[_Beside]) -> pd.DataFrame:
    """Return some rows, and intervals as activities without anything that tells them apart."""
    none = np.zeros(0, dtype=np.int64)
    start, end, like = (
        np.concatenate([none, *(getattr(one.union, name) for one in beside)])
        for name in ("start", "end", "row")
    )
    kinds = [kind for one in beside for kind in [one.kind] * len(one.union)]
    is_host = (kernels["activity"] == "host").to_numpy(bool)[like]
    given: dict[str, Any] = {
        **{name: kernels[name].array.take(like) for name in ("rank", "device", "step")},
        "name": [BESIDE] * len(like),
        "kind": kinds,
        "activity": np.where(is_host, "host", "kernel"),
        "stream": np.full(len(like), -1),
        "start_ns": start,
        "duration_ns": end - start,
    }
    lacking = np.full(len(like), -1)
    columns = {}
    for name in [*(column.name for column in columns_of("kernels", "reader")), *ADDED]:
        column = kernels[name]
        if name not in given:
            columns[name] = column.array.take(np.append(chosen, lacking), allow_fill=True)
        elif isinstance(column.dtype, pd.CategoricalDtype):
            own, more = column.array.take(chosen), pd.Categorical(given[name])
            columns[name] = union_categoricals([_used(own), _used(more)])
        else:
            columns[name] = pd.concat(
                [column.iloc[chosen], pd.Series(given[name], dtype=column.dtype)]
            ).array
        if isinstance(column.dtype, pd.CategoricalDtype):
            columns[name] = _used(columns[name])
    found: pd.DataFrame = pd.DataFrame(columns)
    return found


def _used(column: Any) -> pd.Categorical:  # noqa: ANN401 - arrays of pandas
    """Return a categorical of texts without the categories that it does not use."""
    used, codes = np.unique(column.codes, return_inverse=True)
    is_missing = len(used) > 0 and used[0] < 0
    texts = pd.Index(column.categories.take(used[int(is_missing) :]), dtype="str")
    return pd.Categorical.from_codes(codes - int(is_missing), texts)


@once_per_trace
def rank_totals(trace: Trace) -> tuple[RankTotals, ...]:
    """Return what the time of each rank adds up to, in whole ns; of an analyzed trace.

    Where the trace holds some ranks in detail, the totals of all came with it.
    """
    if trace.meta.totals:
        return trace.meta.totals
    kernels, hosts, nodes = trace.kernels, dict(trace.meta.hosts), dict(trace.meta.nodes)
    rank = kernels["rank"].to_numpy(np.int64)
    allotted = allotted_time(trace)
    is_collective = (kernels["kind"] == "collective").to_numpy(bool)
    idle_by_cause = _idle_by_cause(trace)
    steps: dict[int, list[int]] = {}
    for step in find_steps(trace):
        steps.setdefault(step.rank, []).append(step.duration_ns)
    place = places(trace.meta)
    found = []
    for one in np.unique(rank).tolist():
        mine = rank == one
        busy_ns = int(allotted[mine].sum())
        window_ns = measure_capacity(kernels[mine])
        found.append(
            RankTotals(
                rank=one,
                host=hosts.get(one),
                num_activities=int(mine.sum()),
                num_steps=len(steps.get(one, [])),
                steps_ns=sum(steps.get(one, [])),
                window_ns=window_ns,
                busy_ns=busy_ns,
                exposed_communication_ns=int(allotted[mine & is_collective].sum()),
                idle_ns=window_ns - busy_ns,
                idle_by_cause_ns=idle_by_cause.get(one, {}),
                node=nodes.get(one),
                gpu_uuids=tuple(uuid for rank, uuid in trace.meta.gpu_uuids if rank == one),
                place=place.get(one, {}),
            )
        )
    return tuple(found)


def _idle_by_cause(trace: Trace) -> dict[int, dict[str, int]]:
    """Return for each rank the idle time inside its window by cause; unknown is a cause, too."""
    idle = trace.idle[trace.idle["edge"].isna().to_numpy(bool)] if len(trace.idle) else trace.idle
    found: dict[int, dict[str, int]] = {}
    sums = idle.groupby(["rank", "cause"], observed=True, dropna=False)["duration_ns"].sum()
    for (rank, cause), time_ns in sums.items():  # type: ignore[misc]
        name = "unknown" if pd.isna(cause) else str(cause)
        found.setdefault(int(rank), {})[name] = int(time_ns)
    return found
