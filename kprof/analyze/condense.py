"""What ranks do to one another, in a fraction of the rows, and what the time of each adds up to.

The recordings of a thousand ranks fit into no memory. What a rank does to the others is in its
collectives, in what ran beside them and in its steps; the rest of it counts by its sums.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pandas as pd

from kprof.analyze.attribution.overlap import CLASSES, allotted_time, classes_of
from kprof.analyze.attribution.steps import find_steps, outside_steps, step_rows
from kprof.analyze.bus_bandwidth import messages
from kprof.analyze.groupings import measure_capacity
from kprof.analyze.intervals import Intervals, disjoint
from kprof.analyze.rank_layout import places
from kprof.trace import SCHEMA, RankTotals, Trace, columns_of, empty, once_per_trace

# Of the columns that passes add, what says who waits for whom.
ADDED = ("step", "kind")
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
    columns = [*(column.name for column in columns_of("kernels", "reader")), *ADDED]
    chosen = inside[is_collective[inside]]
    own = kernels[columns].iloc[chosen].assign(message=messages(trace)[chosen])
    beside = _beside(kernels[columns], inside, is_collective)
    rows = pd.concat([own, *beside], ignore_index=True)
    # Categories of several frames become objects.
    texts = {c.name: "category" for c in SCHEMA["kernels"] if c.dtype == "category"}
    rows = rows.astype({name: texts.get(name) or kernels[name].dtype for name in rows.columns})
    ranges = trace.ranges.iloc[step_rows(trace.ranges)]
    ranges = ranges[[column.name for column in columns_of("ranges", "reader")]]
    meta = replace(
        trace.meta, compiled=(), graph_notes=(), memory=(), what_if=(), totals=rank_totals(trace)
    )
    samples = trace.samples.iloc[:0]
    return Trace(rows, ranges.reset_index(drop=True), samples, meta)


def _beside(
    kernels: pd.DataFrame, inside: np.ndarray, is_collective: np.ndarray
) -> list[pd.DataFrame]:
    """Return the union of all but collectives as rows, of each device and step."""
    table = kernels.iloc[inside]
    start = table["start_ns"].to_numpy(np.int64)
    end = start + table["duration_ns"].to_numpy(np.int64)
    gpu = table.groupby(["rank", "device"], sort=False).ngroup().to_numpy()
    step = table["step"].to_numpy(np.int64, na_value=-1)
    collective = is_collective[inside]
    of_class = classes_of(table)
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
                # Rows of the whole table, for what the intervals share: rank, device, step.
                first = inside[kept.row]
                rows = kernels.iloc[first]
                found.append(_rows(rows, kept, [*CLASSES, BESIDE][one_class]))
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


def _rows(rows: pd.DataFrame, union: Intervals, kind: str) -> pd.DataFrame:
    """Return intervals as activities without anything that tells them from one another."""
    table: pd.DataFrame = empty("kernels").reindex(range(len(union)))
    for column in ("rank", "device", "step"):
        table[column] = rows[column].to_numpy()
    table["name"], table["kind"] = BESIDE, kind
    is_host = (rows["activity"] == "host").to_numpy(bool)
    table["activity"] = np.where(is_host, "host", "kernel")
    table["stream"] = -1
    table["start_ns"], table["duration_ns"] = union.start, union.end - union.start
    return table


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
