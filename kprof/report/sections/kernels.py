"""The kernels that take most of the time, with their distance from the roofline."""

from __future__ import annotations

import pandas as pd

from kprof.analyze.groupings import find_dominant, group_kernels
from kprof.report.kernel_names import readable
from kprof.report.section import Column, Section, Table, Text
from kprof.report.units import (
    and_before,
    format_count,
    format_saving,
    format_share,
    format_share_of_limit,
    format_time,
    or_missing,
    shorten,
    whose_time,
)
from kprof.trace import Trace

TITLE = "Top kernels"
ORDER = 50

ROWS = 50
OPERATOR = Column("Operator", essential=False)
# After the name, in the order in which a narrow terminal keeps them.
COLUMNS = (
    Column("Share", "right"),
    Column("Time", "right"),
    Column("Of roofline", "right", essential=False),
    Column("Bound", essential=False),
    Column("Saving", "right", essential=False),
    OPERATOR,
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
    noun = "operators" if trace.is_host_only else "kernels"
    lead = Text(_lead(groups, noun, whose_time(is_host_only=trace.is_host_only)))
    shown = groups.head(ROWS)
    kinds, dtypes, bounds, ops = (
        find_dominant(kernels, "name", column) for column in ("kind", "dtype", "bound", "op")
    )
    rows = [
        (
            str(row.name),
            format_share(row.share),
            format_time(row.time_ns),
            format_share_of_limit(row),
            or_missing(bounds.get(row.name)),
            format_saving(row),
            or_missing(ops.get(row.name)),
            or_missing(kinds.get(row.name)),
            f"{row.calls:,}",
            or_missing(dtypes.get(row.name)),
        )
        for row in shown.itertuples(index=False)
    ]
    columns = (Column("Operator" if trace.is_host_only else "Kernel", "name"), *COLUMNS)
    # On the host an activity is an operator: another column of them would say nothing new.
    kept = [i for i, one in enumerate(columns) if one is not OPERATOR or not trace.is_host_only]
    table = Table(
        tuple(columns[i] for i in kept),
        tuple(tuple(row[i] for i in kept) for row in rows),
        _caption(trace, len(groups)),
        _shares(shown),
    )
    return Section(title, ORDER, (lead, table))


def _shares(groups: pd.DataFrame) -> tuple[float, ...]:
    return tuple(float(share) for share in groups["share"])


def _lead(groups: pd.DataFrame, noun: str, whose: str) -> str:
    longest = groups["share"].head(5)
    lead = (
        f"The {len(longest)} longest of {len(groups):,} {noun} take "
        f"{format_share(longest.sum())} of {whose}."
        if len(groups) > len(longest)
        else f"{format_count(len(groups), noun[:-1])} took all of {whose}."
    )
    best = groups.sort_values("saving_ns", ascending=False, kind="stable").iloc[0]
    if pd.isna(best["saving_ns"]) or not best["saving_ns"]:
        return lead
    return (
        f"{lead} {shorten(readable(best['name']), 60)} is furthest from its roofline: "
        f"reaching it would save {'at most ' if best['is_least'] else ''}"
        f"{format_time(best['saving_ns'])}."
    )


def _caption(trace: Trace, number: int) -> str:
    is_host_only = trace.is_host_only
    shown = f"The {ROWS} longest of {number:,}. " if number > ROWS else ""
    operator = "" if is_host_only else " Operator: the one behind most of the kernel's time."
    return (
        f"{shown}Share: of all {whose_time(is_host_only=is_host_only)}{and_before(trace)}. Of "
        "roofline: time at the roofline over time taken. Saving: the time saved at the roofline; a "
        "dash where no work model applies, ≥ and ≤ where only a minimum of the work is known."
        f"{operator}"
    )
