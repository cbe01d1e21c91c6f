"""One trace from the traces of several processes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
from pandas.api.types import union_categoricals

from kprof.errors import TraceError
from kprof.trace import SCHEMA, Table, Trace

# Half a century: clocks that lie farther apart are not both right.
FARTHEST_NS = 50 * 365 * 86_400 * 10**9


def merge(traces: list[Trace], source: str) -> Trace:
    """Put the rows of several processes into one trace with distinct ranks on one clock.

    Processes whose files carry the same rank are numbered in the order given, and a caveat
    says so. Clocks are aligned by wall time.
    """
    if len(traces) == 1:
        return traces[0]
    _refuse_mixed_activity(traces)
    ranks = [_ranks(trace) for trace in traces]
    caveats = [c for trace in traces for c in trace.meta.caveats]
    if len({r for each in ranks for r in each}) < sum(len(each) for each in ranks):
        traces = [_renumbered(trace, i) for i, trace in enumerate(traces)]
        caveats.append(
            "Several files are of the same rank, or do not name theirs: each counts as a rank of "
            "its own, in the order of the files."
        )
    traces = _on_one_clock(traces, caveats)
    first = traces[0].meta
    counts: dict[str, int] = {}
    for trace in traces:
        for name, count in trace.meta.counts.items():
            counts[name] = counts.get(name, 0) + count
    meta = replace(
        first,
        source=source,
        num_ranks=len({r for trace in traces for r in _ranks(trace)}),
        counts=counts,
        caveats=tuple(dict.fromkeys(caveats)),
    )
    return Trace(
        _concat(traces, "kernels"), _concat(traces, "ranges"), _concat(traces, "samples"), meta
    )


def _refuse_mixed_activity(traces: list[Trace]) -> None:
    with_device = [len(trace.kernels) > 0 for trace in traces]
    if any(with_device) and not all(with_device):
        without = traces[with_device.index(False)].meta.source
        raise TraceError(
            f"{without} has no GPU activity, but other files opened with it have",
            fix="open the files with GPU activity together, and this one alone",
        )


def _ranks(trace: Trace) -> list[int]:
    rows = np.concatenate([trace.kernels["rank"].to_numpy(), trace.ranges["rank"].to_numpy()])
    return [int(rank) for rank in np.unique(rows)]


def _renumbered(trace: Trace, rank: int) -> Trace:
    number = np.int32(rank)
    samples = trace.samples
    return replace(
        trace.with_kernels(rank=number).with_ranges(rank=number),
        samples=samples.assign(rank=samples["rank"].where(samples["rank"] < 0, number)),
    )


def _on_one_clock(traces: list[Trace], caveats: list[str]) -> list[Trace]:
    """Shift every clock to the first one's zero; times stay integer nanoseconds."""
    known = [base for trace in traces if (base := trace.meta.base_time_ns) is not None]
    if known and len(known) < len(traces):
        caveats.append("Some files do not tell their wall time; their clocks are not aligned.")
    if known and max(known) - min(known) > FARTHEST_NS:
        caveats.append("The files' wall times lie decades apart; their clocks are not aligned.")
        return traces
    zero = traces[0].meta.base_time_ns
    return [
        trace if base is None or zero is None or base == zero else _shifted(trace, base - zero)
        for trace in traces
        for base in [trace.meta.base_time_ns]
    ]


def _shifted(trace: Trace, by_ns: int) -> Trace:
    return replace(
        trace.with_kernels(start_ns=trace.kernels["start_ns"] + by_ns).with_ranges(
            start_ns=trace.ranges["start_ns"] + by_ns
        ),
        samples=trace.samples.assign(time_ns=trace.samples["time_ns"] + by_ns),
    )


def _concat(traces: list[Trace], table: Table) -> pd.DataFrame:
    parts = [getattr(trace, table) for trace in traces]
    columns: dict[str, object] = {}
    for column in SCHEMA[table]:
        if column.added_by != "reader":
            continue
        series = [part[column.name] for part in parts]
        if column.dtype == "category":
            columns[column.name] = union_categoricals(series)
        else:
            columns[column.name] = pd.concat(series, ignore_index=True)
    merged: pd.DataFrame = pd.DataFrame(columns)
    return merged
