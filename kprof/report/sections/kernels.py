"""The kernels that take most of the time, and how far each is from its roofline."""

from __future__ import annotations

import pandas as pd

from kprof.analyze.summary import find_dominant, group_kernels
from kprof.report.section import Column, Section, Table, Text
from kprof.report.units import (
    MISSING,
    format_count,
    format_share,
    format_share_of_limit,
    format_time,
    or_missing,
    readable,
    shorten,
)
from kprof.trace import Trace

TITLE = "Top kernels"
ORDER = 50

ROWS = 50
# After the name, in the order in which a narrow terminal keeps them.
COLUMNS = (
    Column("Share", "right"),
    Column("Time", "right"),
    Column("Of roofline", "right", essential=False),
    Column("Bound", essential=False),
    Column("Operator", essential=False),
    Column("Saving", "right", essential=False),
    Column("Kind", essential=False),
    Column("Calls", "right", essential=False),
    Column("Type", essential=False),
)


def render(trace: Trace) -> Section:
    """Render the kernels by name, longest first."""
    kernels = trace.kernels
    title = "Top operators of the host" if trace.is_host_only else TITLE
    if kernels.empty:
        return Section(title, ORDER, (Text("No activity was recorded."),))
    groups = group_kernels(kernels, ["name"])
    lead = Text(_lead(groups, "operators" if trace.is_host_only else "kernels"))
    shown = groups.head(ROWS)
    kinds, dtypes, bounds, ops = (
        find_dominant(kernels, "name", column) for column in ("kind", "dtype", "bound", "op")
    )
    rows = [
        (
            str(row.name),
            format_share(row.share),
            format_time(row.time_ns),
            format_share_of_limit(row.limit_ns, row.limited_time_ns),
            or_missing(bounds.get(row.name)),
            or_missing(ops.get(row.name)),
            format_time(row.saving_ns) if row.limited_time_ns else MISSING,
            or_missing(kinds.get(row.name)),
            f"{row.calls:,}",
            or_missing(dtypes.get(row.name)),
        )
        for row in shown.itertuples(index=False)
    ]
    first = Column("Operator" if trace.is_host_only else "Kernel", "name")
    table = Table(
        (first, *COLUMNS), tuple(rows), caption=_caption(len(groups)), share=_shares(shown)
    )
    return Section(title, ORDER, (lead, table))


def _shares(groups: pd.DataFrame) -> tuple[float, ...]:
    return tuple(float(share) for share in groups["share"])


def _lead(groups: pd.DataFrame, noun: str) -> str:
    longest = groups["share"].head(5)
    lead = (
        f"The {len(longest)} longest of {len(groups):,} {noun} take "
        f"{format_share(longest.sum())} of the time."
        if len(groups) > len(longest)
        else f"{format_count(len(groups), noun[:-1])} took all of the time."
    )
    best = groups.sort_values("saving_ns", ascending=False, kind="stable").iloc[0]
    if not best["saving_ns"]:
        return lead
    return (
        f"{lead} The largest distance to the roofline is in {shorten(readable(best['name']), 60)}: "
        f"reaching it would save {format_time(best['saving_ns'])}."
    )


def _caption(number: int) -> str:
    shown = f"The {ROWS} longest of {number:,}. " if number > ROWS else ""
    return (
        f"{shown}Share: of all device time. Of roofline: time at the roofline over time taken. "
        "Saving: what reaching it would save; a dash where no work model applies. Operator: the "
        "one behind most of the kernel's time."
    )
