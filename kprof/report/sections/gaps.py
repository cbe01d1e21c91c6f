"""Idle time: what the device waited for, and its longest waits."""

from __future__ import annotations

import numpy as np
import pandas as pd

from kprof.analyze.summary import group_gaps
from kprof.report.section import Column, Section, Table, Text
from kprof.report.units import (
    MISSING,
    format_count,
    format_share,
    format_time,
    or_missing,
    round_shares,
)
from kprof.trace import Trace

TITLE = "Idle time"
ORDER = 75

LONGEST = 12
CAUSES = {
    "queued": "launched in time; the device was between activities or waited for another stream",
    "synchronization": "the host waited for the device, then launched late",
    "allocation": "the host allocated or freed memory",
    "data": "the host waited for data",
    "host": "the host had not launched the next activity yet",
    "between operators": "Python code, data loading or waiting",
}
UNEXPLAINED = "not known"
BETWEEN_OPERATORS = "between operators"


def render(trace: Trace) -> Section:
    """Render idle time by cause and the longest gaps."""
    gaps = group_gaps(trace.kernels)
    if gaps.empty:
        return Section(TITLE, ORDER, (Text("There is no gap between activities."),), False)
    times = [int(time_ns) for time_ns in gaps["time_ns"]]
    unexplained = BETWEEN_OPERATORS if trace.is_host_only else UNEXPLAINED
    causes = [unexplained if pd.isna(cause) else str(cause) for cause in gaps["gap_cause"]]
    rows = tuple(
        (cause, share, format_time(time_ns), f"{number:,}", format_time(longest), _meaning(cause))
        for cause, share, time_ns, number, longest in zip(
            causes, round_shares(times), times, gaps["gaps"], gaps["longest_ns"], strict=True
        )
    )
    columns = (
        Column("Cause"),
        Column("Share", "right"),
        Column("Time", "right"),
        Column("Gaps", "right", essential=False),
        Column("Longest", "right", essential=False),
        Column("Meaning", "prose", essential=False),
    )
    lead = (
        f"{format_time(sum(times))} in {format_count(int(gaps['gaps'].sum()), 'gap')}; "
        f"{format_share(times[0] / sum(times))} of it ({causes[0]}): {_meaning(causes[0])}."
    )
    bars = tuple(time_ns / sum(times) for time_ns in times)
    table = Table(columns, rows, caption="Idle time by cause.", share=bars)
    return Section(TITLE, ORDER, (Text(lead), table, _longest(trace.kernels)), False)


def _meaning(cause: str) -> str:
    return CAUSES.get(cause, "no launch record tells what the host did")


def _longest(kernels: pd.DataFrame) -> Table:
    gap_ns = kernels["gap_before_ns"].to_numpy(np.int64, na_value=0)
    number = min(LONGEST, int((gap_ns > 0).sum()))
    largest = np.argsort(-gap_ns, kind="stable")[:number]
    first_ns = int(kernels["start_ns"].min())
    rows = tuple(
        (
            format_time(row.gap_before_ns),
            or_missing(row.gap_cause),
            str(row.name),
            or_missing(row.op),
            or_missing(row.phase),
            MISSING if pd.isna(row.step) else str(row.step),
            format_time(row.start_ns - first_ns),
        )
        for row in kernels.iloc[largest].itertuples(index=False)
    )
    columns = (
        Column("Gap", "right"),
        Column("Cause"),
        Column("Before", "name"),
        Column("Operator"),
        Column("Phase"),
        Column("Step", "right"),
        Column("At", "right"),
    )
    return Table(columns, rows, caption="The longest gaps, and the activity that ended each.")
