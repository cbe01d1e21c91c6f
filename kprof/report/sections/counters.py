"""Hardware counters of the kernels: bytes moved, load, bound."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from kprof.analyze.groupings import collapse_layers
from kprof.analyze.roofline.agreement import (
    by_work,
    compare_bounds,
    is_kept_in_cache,
    traffic_ratio,
)
from kprof.analyze.roofline.bound import BOUNDS, bound_by_counters
from kprof.analyze.roofline.hardware_counters import (
    NOT_COUNTED,
    counted_bytes,
    counted_shares,
    has_samples,
    interval_ns,
    is_counted,
    sampled_by,
    share_out,
)
from kprof.analyze.roofline.utilisation import share_of_time
from kprof.report.section import Column, Part, Section, Table, Text
from kprof.report.units import MISSING, format_amount, format_count, format_share, format_time
from kprof.trace import Trace

TITLE = "Hardware counters"
ORDER = 55

ROWS = 40
NOT_RECORDED = (
    "No hardware counters were recorded. `kprof run --counters` samples memory traffic during the "
    "run; `kprof ncu RUN` counts the most expensive kernels in another run."
)
COLUMNS = (
    Column("Kernel", "name"),
    Column("Counted", "right"),
    Column("Each takes", "right"),
    Column("Traffic", "right"),
    Column("Of minimum", "right", essential=False),
    Column("DRAM", "right"),
    Column("SM", "right"),
    Column("Tensor", "right", essential=False),
    Column("Occupancy", "right", essential=False),
    Column("Bound"),
    Column("By work", essential=False),
)


def render(trace: Trace) -> Section:
    """Render the counters by kernel and size, longest first."""
    kernels = trace.kernels
    counted = is_counted(kernels)
    parts: list[Part] = []
    if counted.any():
        parts += [Text(_lead(kernels, counted)), _table(kernels[counted])]
    if has_samples(trace):
        parts += [Text(_sampled_lead(trace)), *_sampled_tables(trace)]
    if not parts:
        return Section(TITLE, ORDER, (Text(NOT_RECORDED),), in_terminal=False)
    return Section(TITLE, ORDER, tuple(parts))


def _sampled_lead(trace: Trace) -> str:
    read, written = (share_out(trace, name) for name in ("dram_read_bytes", "dram_written_bytes"))
    inside, beside = read.by_row.sum() + written.by_row.sum(), read.beside + written.beside
    return (
        f"Sampled every {format_time(interval_ns(trace))} while the workload ran: "
        f"{format_amount(read.by_row.sum(), 'B')} read from the device's memory and "
        f"{format_amount(written.by_row.sum(), 'B')} written to it by the recorded activities; "
        f"{format_share(beside / max(inside + beside, 1))} of all traffic was outside of them."
    )


def _sampled_tables(trace: Trace) -> Iterator[Table]:
    """Yield the samples by module, by range of the workload, and by kernel."""
    kernels = trace.kernels
    modules = sampled_by(trace, collapse_layers(kernels["module"]))
    yield _sampled_table(trace, "Module", modules, "Layers of one kind together. ")
    ranges = sampled_by(trace, kernels["range"]).dropna(subset=["label"])
    if len(ranges):
        yield _sampled_table(trace, "Range", ranges, "")
    names = sampled_by(trace, kernels["name"])
    is_long = names["time_ns"] >= interval_ns(trace) * names["number"]
    if is_long.any():
        lead = "Kernels that last at least one sample; shorter ones cannot be separated. "
        yield _sampled_table(trace, "Kernel", names[is_long], lead)


def _sampled_table(trace: Trace, header: str, groups: pd.DataFrame, lead: str) -> Table:
    device = trace.meta.device
    rows = []
    for one in groups.head(ROWS).itertuples(index=False):
        rate = (one.read_bytes + one.written_bytes) / max(one.time_ns, 1) * 1e9
        share = MISSING if device is None else format_share(rate / device.memory_bytes_per_s)
        amounts = (format_amount(one.read_bytes, "B"), format_amount(one.written_bytes, "B"))
        rows.append(
            (
                _named(one.label, header),
                format_time(one.time_ns),
                *amounts,
                format_amount(rate, "B/s"),
                share,
                _share(one.sm_share),
                _share(one.tensor_share),
            )
        )
    headers = ("Time", "Read", "Written", "Rate", "Of memory", "SM", "Tensor")
    columns = (Column(header, "name"), *(Column(header, "right") for header in headers))
    caption = (
        f"{lead}Each sample is divided by time among the kernels that ran in it. Of memory: the "
        "rate over the memory's bandwidth. SM: cycles in which SMs were active, over those of all "
        "SMs at the busiest sample's clock. Tensor: tensor core cycles over the active SM cycles."
    )
    return Table(columns, tuple(rows), caption=caption)


def _named(name: Any, header: str) -> str:  # noqa: ANN401 - a cell of a table
    return _module(name) if header == "Module" else str(name)


def _module(name: Any) -> str:  # noqa: ANN401 - a cell of a table
    return "in no module" if pd.isna(name) else str(name) or "(the model itself)"


def _lead(kernels: pd.DataFrame, counted: np.ndarray) -> str:
    share = format_share(share_of_time(kernels, counted))
    number = format_count(int(counted.sum()), "launch", "launches")
    lead = f"{number} counted, {share} of the device time."
    kept = is_kept_in_cache(kernels)
    found = compare_bounds(kernels)
    if found.share is not None:
        lead += (
            f" The bound by work agrees with the bound by counters for "
            f"{format_share(found.share)} of {found.num_agreeing + found.num_differing:,}; "
            f"{found.num_borderline:,} more lie within 5 points of a border"
        )
        lead += f", and of {int(kept.sum()):,} a cache kept a part." if kept.any() else "."
    return lead


def _table(counted: pd.DataFrame) -> Table:
    memory, compute = counted_shares(counted)
    traffic = counted_bytes(counted)
    values = counted[["name", "grid", "block", "duration_ns"]].assign(
        traffic=np.where(traffic == NOT_COUNTED, np.nan, traffic),
        ratio=traffic_ratio(counted),
        memory=memory,
        compute=compute,
        tensor=counted["tensor_percent"].to_numpy(np.float64) / 100,
        occupancy=counted["occupancy_percent"].to_numpy(np.float64) / 100,
        counters=bound_by_counters(counted),
        work=by_work(counted),
    )
    groups = values.groupby(["name", "grid", "block"], observed=True, dropna=False, sort=False)
    total_ns = groups["duration_ns"].sum().sort_values(ascending=False, kind="stable")
    rows = [_row(str(key[0]), groups.get_group(key)) for key in total_ns.index[:ROWS]]
    cut = f"The {ROWS} longest of {len(total_ns):,}. " if len(total_ns) > ROWS else ""
    caption = (
        f"{cut}Launches of one kernel over one grid; shares are of the peak, medians of its "
        "launches. Of minimum: traffic over the minimum that the work needs; above 1, data was "
        "read again; below 1, it came from a cache. Bound: by the counters."
    )
    return Table(COLUMNS, tuple(rows), caption=caption)


def _row(name: str, launches: pd.DataFrame) -> tuple[str, ...]:
    middle = launches.drop(columns=["name", "grid", "block"]).median()
    return (
        name,
        f"{len(launches):,}",
        format_time(middle["duration_ns"]),
        MISSING if np.isnan(middle["traffic"]) else format_amount(middle["traffic"], "B"),
        MISSING if np.isnan(middle["ratio"]) else f"{middle['ratio']:.2f}",
        *(_share(middle[what]) for what in ("memory", "compute", "tensor", "occupancy")),
        _bounds(launches["counters"]),
        _bounds(launches["work"]),
    )


def _share(value: float) -> str:
    return MISSING if np.isnan(value) else format_share(value)


def _bounds(places: pd.Series[Any]) -> str:
    """Return the most frequent bound; a dash where none is known."""
    known = places[places >= 0]
    return BOUNDS[int(known.mode().iloc[0])] if len(known) else MISSING
