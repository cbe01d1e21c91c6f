"""The model's modules: how the device time spreads over them."""

from __future__ import annotations

from typing import Any

import pandas as pd

from kprof.analyze.capture_quality.unanswered import why_no_modules
from kprof.analyze.groupings import collapse_layers, group_modules
from kprof.analyze.roofline.utilisation import share_of_time
from kprof.report.section import Column, Section, Table, Text
from kprof.report.units import (
    and_before,
    format_count,
    format_share,
    format_share_of_limit,
    format_time,
    or_missing,
    whose_time,
)
from kprof.trace import Trace

TITLE = "Modules"
ORDER = 60

ROWS = 40
COLUMNS = (
    Column("Module", "name"),
    Column("Share", "right"),
    Column("Time", "right"),
    Column("Forward", "right", essential=False),
    Column("Backward", "right", essential=False),
    Column("Of roofline", "right", essential=False),
    Column("Top operator", essential=False),
)


def render(trace: Trace) -> Section:
    """Render device time by module: layers of one kind together, then each by itself."""
    kernels = trace.kernels
    if why := why_no_modules(trace):
        return Section(TITLE, ORDER, (Text(why.sentence),), in_terminal=False)
    collapsed = collapse_layers(kernels["module"])
    parts = [_table(kernels.assign(module=collapsed), "Layers of one kind together (*).", 8)]
    if collapsed.nunique() < kernels["module"].nunique():
        parts.append(_table(kernels, "Every layer by itself.", 0))
    return Section(TITLE, ORDER, (Text(_lead(trace)), *parts))


def _lead(trace: Trace) -> str:
    kernels, whose = trace.kernels, whose_time(is_host_only=trace.is_host_only)
    inside = share_of_time(kernels, kernels["module"].notna())
    number = format_count(int(kernels["module"].nunique()), "module")
    return (
        f"{format_share(inside)} of {whose}{and_before(trace)} is in {number}. An activity counts "
        "for the innermost module around its launch, and in the backward pass for the module of "
        "its forward call."
    )


def _table(kernels: pd.DataFrame, caption: str, terminal_rows: int) -> Table:
    groups = group_modules(kernels)
    groups = groups[groups["module"].notna()]
    shown = groups.head(ROWS)
    cut = f" The {ROWS} longest of {len(groups):,}." if len(groups) > ROWS else ""
    return Table(
        COLUMNS,
        tuple(_row(row) for row in shown.itertuples(index=False)),
        caption=caption + cut,
        share=tuple(float(share) for share in shown["share"]),
        terminal_rows=terminal_rows,
    )


def _row(group: Any) -> tuple[str, ...]:  # noqa: ANN401 - a named tuple of pandas
    return (
        str(group.module) or "(the model itself)",
        format_share(group.share),
        format_time(group.time_ns),
        _of_phase(group.forward_ns),
        _of_phase(group.backward_ns),
        format_share_of_limit(group),
        or_missing(group.op),
    )


def _of_phase(time_ns: Any) -> str:  # noqa: ANN401 - an integer of pandas, or missing
    """Format a module's time in a phase; a dash, too, where it spends none there."""
    return format_time(None if pd.isna(time_ns) or not time_ns else time_ns)
