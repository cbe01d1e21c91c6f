"""One trace from the traces of several processes.

Collectives recorded without a number get one by their order, where all ranks agree on it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kprof.collect.clocks import END_SKEW_NS, END_SKEW_PART, FAR_APART, TOLERANCE_NS, align, ways
from kprof.collect.collectives import SYMMETRIC, Run, by_order
from kprof.errors import TraceError
from kprof.storage import ROWS_OF
from kprof.trace import SCHEMA, Caveat, Gpu, Table, Trace

# One in so many matched collectives may not overlap: lost and damaged records.
ONE_IN = 20

# Half a century: clocks that lie farther apart are not both right.
FARTHEST_NS = 50 * 365 * 86_400 * 10**9


ALIKE = Caveat(
    "ranks_by_order",
    "Several files are of the same rank, or do not name theirs: each counts as a rank of its own, "
    "in the order of the files.",
)


def merge(traces: list[Trace], source: str) -> Trace:
    """Put the rows of several processes into one trace with distinct ranks on one clock.

    They lie in the order of the ranks, whatever that of the files. Processes whose files carry the
    same rank are numbered in the order given, and a caveat says so. Clocks are aligned by wall
    time, and by collectives where those contradict it.
    """
    if len(traces) == 1:
        return numbered(traces[0])
    _refuse_mixed_activity(traces)
    _refuse_mixed_timelines(traces)
    ranks = [ranks_of(trace) for trace in traces]
    are_ranks = tell_their_ranks(traces)
    if are_ranks:
        # So that the order of the files decides nothing.
        traces = [
            trace for _, trace in sorted(zip(ranks, traces, strict=True), key=lambda one: one[0])
        ]
        more = _missing(sum(map(len, ranks)), traces)
    else:
        traces, more = by_order_of_files(traces), [ALIKE]
    caveats = [*(c for trace in traces for c in trace.meta.caveats), *more]
    gpus = _gpus(traces)
    caveats += _mixed(gpus)
    traces, base_time_ns, clocks = _on_one_clock(traces, caveats, are_ranks=are_ranks)
    summary, grade = clocks
    counts = Counter[str]()
    for trace in traces:
        counts.update(trace.meta.counts)
    meta = replace(
        traces[0].meta,
        source=source,
        gpus=gpus,
        base_time_ns=base_time_ns,
        clocks=summary,
        clocks_grade=grade,
        hosts=_listed(traces, "hosts"),
        nodes=_listed(traces, "nodes"),
        gpu_uuids=_listed(traces, "gpu_uuids"),
        graph_notes=_listed(traces, "graph_notes"),
        memory=_listed(traces, "memory"),
        totals=_listed(traces, "totals"),
        process_groups=tuple(dict.fromkeys(_listed(traces, "process_groups"))),
        num_ranks=len({r for trace in traces for r in ranks_of(trace)}),
        counts=dict(counts),
        compiled=tuple(dict.fromkeys(_listed(traces, "compiled"))),
        caveats=tuple(dict.fromkeys(caveats)),
    )
    return numbered(
        Trace(
            concatenated(traces, "kernels"),
            concatenated(traces, "ranges"),
            concatenated(traces, "samples"),
            meta,
        )
    )


def _listed(traces: list[Trace], name: str) -> tuple[Any, ...]:
    """Return what all recordings list under a name, one behind the other."""
    return tuple(one for trace in traces for one in getattr(trace.meta, name))


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


def _refuse_mixed_activity(traces: list[Trace]) -> None:
    with_device = [len(trace.kernels) > 0 and not trace.is_host_only for trace in traces]
    if any(with_device) and not all(with_device):
        without = traces[with_device.index(False)].meta.source
        raise TraceError(
            f"{without} has no GPU activity, but other files opened with it have",
            fix="open the files with GPU activity together, and this one alone",
        )


def _refuse_mixed_timelines(traces: list[Trace]) -> None:
    if len({trace.has_timeline for trace in traces}) > 1:
        without = next(trace for trace in traces if not trace.has_timeline)
        raise TraceError(
            f"{without.meta.source} has no timeline, but other files opened with it have",
            fix="open it alone",
        )


def tell_their_ranks(traces: list[Trace]) -> bool:
    """Tell whether each rank is in one of these traces alone."""
    ranks = [rank for trace in traces for rank in ranks_of(trace)]
    return len(set(ranks)) == len(ranks)


def ranks_of(trace: Trace) -> list[int]:
    """Return the ranks of a trace, in their order."""
    rows = np.concatenate([trace.kernels["rank"].to_numpy(), trace.ranges["rank"].to_numpy()])
    return [int(rank) for rank in np.unique(rows)]


def _mixed(gpus: tuple[Gpu, ...]) -> list[Caveat]:
    """Say where the ranks used several models of GPU."""
    models = dict.fromkeys(gpu.name for gpu in gpus)
    if len(models) < 2:
        return []
    mixed = (
        f"The ranks used several models of GPU: {', '.join(models)}. Ceilings, and what is "
        "compared with them, are the first one's."
    )
    return [Caveat("several_gpu_models", mixed)]


def _missing(number: int, traces: list[Trace]) -> list[Caveat]:
    """Say how many ranks of the job are in no file, where all files tell the same of its size."""
    sizes = {trace.meta.world_size for trace in traces}
    size = sizes.pop() if len(sizes) == 1 else None
    if size is None or size <= number:
        return []
    told = f"Of the {size:,} ranks of the job, {size - number:,} are in no file that was read."
    return [Caveat("ranks_missing", told)]


def by_order_of_files(traces: list[Trace]) -> list[Trace]:
    """Return traces whose ranks are numbered anew, in their order, from 0 on."""
    numbers = [len(ranks_of(trace)) for trace in traces[:-1]]
    firsts = itertools.accumulate(numbers, initial=0)
    return [renumbered(trace, first) for trace, first in zip(traces, firsts, strict=True)]


def renumbered(trace: Trace, first: int) -> Trace:
    """Number the ranks of one file anew, in their order, from `first` on."""
    ranks = np.array(ranks_of(trace))

    def anew(table: pd.DataFrame) -> np.ndarray:
        return (first + np.searchsorted(ranks, table["rank"])).astype(np.int32)

    samples, meta = trace.samples, trace.meta
    number = {rank: first + place for place, rank in enumerate(ranks.tolist())}
    gpus = tuple(
        gpu if gpu.rank is None else replace(gpu, rank=number[gpu.rank]) for gpu in meta.gpus
    )
    hosts = tuple((number[rank], host) for rank, host in meta.hosts)
    nodes = tuple((number[rank], node) for rank, node in meta.nodes)
    uuids = tuple((number[rank], uuid) for rank, uuid in meta.gpu_uuids)
    notes = tuple(replace(note, rank=number[note.rank]) for note in meta.graph_notes)
    memory = tuple(replace(peak, rank=number.get(peak.rank, peak.rank)) for peak in meta.memory)
    totals = tuple(replace(one, rank=number[one.rank]) for one in meta.totals)
    return replace(
        trace.with_kernels(rank=anew(trace.kernels)).with_ranges(rank=anew(trace.ranges)),
        samples=samples.assign(rank=samples["rank"].where(samples["rank"] < 0, anew(samples))),
        meta=replace(
            meta,
            gpus=gpus,
            hosts=hosts,
            nodes=nodes,
            gpu_uuids=uuids,
            # They hold ranks as the job numbers them.
            process_groups=(),
            graph_notes=notes,
            memory=memory,
            totals=totals,
        ),
    )


def _gpus(traces: list[Trace]) -> tuple[Gpu, ...]:
    """Return the GPUs that each rank used under the number it knows them by.

    The GPU 0 of two ranks may be two GPUs, where each was shown only its own; so each counts.
    Where no rank used any, those that some file lists.
    """
    listed = tuple(dict.fromkeys(gpu for trace in traces for gpu in trace.meta.gpus))
    return tuple(gpu for trace in traces for gpu in _used_gpus(trace)) or listed


def _used_gpus(trace: Trace) -> list[Gpu]:
    rank_and_device = trace.kernels[["rank", "device"]].to_numpy()
    return [
        gpu if gpu.rank is not None else replace(gpu, rank=rank)
        for rank, device in np.unique(rank_and_device, axis=0).tolist()
        for gpu in trace.meta.gpus
        if gpu.index == device and gpu.rank in (None, rank)
    ]


def _on_one_clock(
    traces: list[Trace], caveats: list[Caveat], *, are_ranks: bool
) -> tuple[list[Trace], int | None, tuple[str | None, Literal["good", "limited"] | None]]:
    """Return all on one clock, the wall time of its zero, and how far the clocks agree: its grade.

    Several recordings of one rank share no collective, even with equal numbers.
    """
    bases = [trace.meta.base_time_ns for trace in traces]
    known = [base for base in bases if base is not None]
    if known and max(known) - min(known) > FARTHEST_NS:
        apart = "The files' wall times lie decades apart; their clocks are not aligned."
        caveats.append(Caveat("clocks_not_aligned", apart))
        return traces, bases[0], (None, None)
    zero = known[0] if known else None
    shifts = [0 if base is None or zero is None else base - zero for base in bases]
    traces = [shifted(trace, by) for trace, by in zip(traces, shifts, strict=True)]
    is_checked: tuple[bool, ...] = (False,) * len(traces)
    clocks, grade = None, None
    if are_ranks:
        found = align(traces, reference=bases.index(zero))
        traces = [shifted(trace, by) for trace, by in zip(traces, found.shifts_ns, strict=True)]
        by_wall_time = "By wall time. " if len(known) == len(bases) else ""
        is_checked, clocks = found.is_checked, by_wall_time + found.summary
        caveats += found.doubts
        grade = found.grade
    if known and any(b is None and not c for b, c in zip(bases, is_checked, strict=True)):
        untold = "Some files do not tell their wall time; their clocks are not aligned."
        caveats.append(Caveat("clocks_not_aligned", untold))
    return traces, zero, (clocks, grade)


def shifted(trace: Trace, by_ns: int) -> Trace:
    """Shift a trace's clock; times stay integer nanoseconds."""
    if not by_ns:
        return trace
    return replace(
        trace.with_kernels(start_ns=trace.kernels["start_ns"] + by_ns).with_ranges(
            start_ns=trace.ranges["start_ns"] + by_ns
        ),
        samples=trace.samples.assign(time_ns=trace.samples["time_ns"] + by_ns),
    )


def concatenated(traces: list[Trace], table: Table) -> pd.DataFrame:
    """Return the rows of one table of all traces, without columns that name rows of a table."""
    parts = [getattr(trace, table) for trace in traces]
    columns: dict[str, object] = {}
    for column in SCHEMA[table]:
        if (table, column.name) in ROWS_OF or not all(column.name in part for part in parts):
            continue
        series = [part[column.name] for part in parts]
        if column.dtype == "category":
            columns[column.name] = _joined_texts(series)
        else:
            columns[column.name] = pd.concat(series, ignore_index=True)
    merged: pd.DataFrame = pd.DataFrame(columns)
    return merged


def _joined_texts(columns: list[pd.Series[Any]]) -> pd.Categorical:
    """Join categoricals of texts; the categories are in the order of their first mention."""
    number: dict[str, int] = {}
    codes = []
    for column in columns:
        texts = map(str, column.cat.categories.to_numpy(object))
        # A row without a text has the code -1, which reads the last.
        places = [*(number.setdefault(text, len(number)) for text in texts), -1]
        codes.append(np.array(places)[column.cat.codes.to_numpy()])
    return pd.Categorical.from_codes(np.concatenate(codes), pd.Index([*number], dtype="str"))
