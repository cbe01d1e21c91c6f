"""Idle time: its causes, its places, the possible gain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from kprof.analyze.attribution.steps import count_gpu_steps, denominator, split_steps
from kprof.analyze.capture_quality.unanswered import why_no_timeline
from kprof.analyze.findings.one_offs import idle_in_steps_ns, start_up_ns
from kprof.analyze.findings.recoverable import idle_in_steps, stays_ns
from kprof.analyze.idle.causes import find_exposed_waits, group_idle, worst_places
from kprof.report.section import Column, Part, Section, Table, Text
from kprof.report.units import (
    MISSING,
    format_count,
    format_share,
    format_time,
    of_all,
    or_missing,
    round_shares,
)
from kprof.trace import Trace

TITLE = "Idle time"
ORDER = 75

LONGEST = 12
PLACES = 4
TOLD = {"module": "Module", "line": "Python line"}
MEANINGS = {
    "launch-bound": "the host had not launched the next activity yet: Python, operators, launches",
    "data loading": "the host waited for data",
    "synchronization": "the host waited for the device, so later launches came too late",
    "pageable copy": "the host copied from memory that is not pinned",
    "allocator": "the host allocated or freed memory of the device, or pinned memory",
    "collective wait": "the host or the next kernel waited for other ranks",
    "dependency wait": "launched in time, but waited for another stream or graph node",
    "between kernels": "the device's own delay from one activity to the next",
    "profiler": "the recorder's own work, absent without recording",
    "no work": "the host slept or waited for a request",
    "between operators": "Python code or waiting",
}
UNEXPLAINED = "not known"
BETWEEN_OPERATORS = "between operators"
NOT_TOLD = "no launch record, or no record of the host's work"


def render(trace: Trace) -> Section:
    """Render idle time by cause, the places to look at and the longest pieces."""
    if why := why_no_timeline(trace):
        return Section(TITLE, ORDER, (Text(why.sentence),), in_terminal=False)
    pieces, outside = idle_in_steps(trace), _around_operators(trace)
    if pieces.empty:
        return Section(TITLE, ORDER, (Text(outside or "There is no gap between activities."),))
    groups = group_idle(pieces)
    parts: list[Part] = [Text(_lead(trace, groups)), _cause_table(trace, groups)]
    if (places := _places(pieces)).rows:
        parts.append(places)
    parts.append(_longest(trace, pieces))
    parts += [Text(text) for text in (_edges(trace, pieces), outside, _exposed(trace)) if text]
    return Section(TITLE, ORDER, tuple(parts))


def _name(trace: Trace, cause: Any) -> str:  # noqa: ANN401 - a cell of a table
    unexplained = BETWEEN_OPERATORS if trace.is_host_only else UNEXPLAINED
    return unexplained if pd.isna(cause) else str(cause)


def _lead(trace: Trace, groups: pd.DataFrame) -> str:
    idle_ns = int(groups["time_ns"].sum())
    recoverable_ns = int(groups["recoverable_ns"].sum())
    largest = groups.iloc[0]
    name = _name(trace, largest["cause"])
    idle = f"{format_time(idle_ns)} idle"
    if not trace.is_host_only:
        whole = ("all steps" if count_gpu_steps(trace) else "the window") + of_all(trace)
        idle = f"{idle}, {format_share(idle_ns / denominator(trace).time_ns)} of {whole}"
    # As the table has it, whose shares add up to 100 %.
    share = round_shares([int(time_ns) for time_ns in groups["time_ns"]])[0]
    lead = f"{idle}; {share} of it ({name}): {_meaning(name)}."
    if recoverable_ns:
        lead += f" Fixing all causes would save up to {format_time(recoverable_ns)}."
    once_ns = start_up_ns(trace)
    if once_ns:
        lead += f" {format_time(once_ns)} is start-up, which is not recoverable."
    if maybe_ns := int(np.minimum(stays_ns(trace), idle_in_steps_ns(trace)).sum()) - once_ns:
        lead += (
            f" {format_time(maybe_ns)} passed in one wait of a cause, far longer than its others. "
            "It may be start-up, so whether it is recoverable is not known."
        )
    return lead


def _cause_table(trace: Trace, groups: pd.DataFrame) -> Table:
    times = [int(time_ns) for time_ns in groups["time_ns"]]
    rows = tuple(
        (
            name := _name(trace, cause),
            share,
            format_time(time_ns),
            format_time(recoverable_ns),
            f"{pieces:,}",
            format_time(longest_ns),
            _meaning(name),
        )
        for (cause, time_ns, _, recoverable_ns, pieces, longest_ns), share in zip(
            groups.to_numpy(dtype=object), round_shares(times), strict=True
        )
    )
    columns = (
        Column("Cause"),
        Column("Share", "right"),
        Column("Time", "right"),
        Column("Recoverable", "right"),
        Column("Pieces", "right", essential=False),
        Column("Longest", "right", essential=False),
        Column("Meaning", "prose", essential=False),
    )
    return Table(
        columns,
        rows,
        caption="Idle time by cause. Every nanosecond counts once: recoverable times add up.",
        share=tuple(time_ns / max(sum(times), 1) for time_ns in times),
    )


def _meaning(name: str) -> str:
    return MEANINGS.get(name, NOT_TOLD)


def _places(pieces: pd.DataFrame) -> Table:
    """List where each cause lies; Python's lines stand there where stacks were recorded."""
    worst = worst_places(pieces, PLACES).dropna(subset="cause")
    told = {name: header for name, header in TOLD.items() if worst[name].notna().any()}
    cells = [
        [str(cause) for cause in worst["cause"]],
        *([or_missing(value) for value in worst[name]] for name in ("place", *told)),
        [format_time(time_ns) for time_ns in worst["time_ns"]],
        [format_count(number, "time") for number in worst["pieces"]],
    ]
    columns = (
        Column("Cause"),
        Column("Where", "name"),
        *(Column(header) for header in told.values()),
        Column("Time", "right"),
        Column("How often", "right", essential=False),
    )
    caption = "Idle time by place: the operator, module or call that shows the cause."
    return Table(columns, tuple(zip(*cells, strict=True)), caption=caption, terminal_rows=6)


def _longest(trace: Trace, pieces: pd.DataFrame) -> Table:
    kernels = trace.kernels
    longest = pieces.sort_values("duration_ns", ascending=False, kind="stable").head(LONGEST)
    first_ns = min(int(kernels["start_ns"].min()), int(pieces["start_ns"].min()))
    rows = []
    for piece in longest.itertuples(index=False):
        ended = None if pd.isna(piece.kernel_row) else kernels.iloc[int(piece.kernel_row)]
        rows.append(
            (
                format_time(piece.duration_ns),
                _name(trace, piece.cause),
                MISSING if ended is None else str(ended["name"]),
                or_missing(piece.place),
                MISSING if ended is None else or_missing(ended["phase"]),
                MISSING if ended is None or pd.isna(ended["step"]) else str(ended["step"]),
                format_time(piece.start_ns - first_ns),
            )
        )
    columns = (
        Column("Idle", "right"),
        Column("Cause"),
        Column("Before", "name"),
        Column("Where"),
        Column("Phase"),
        Column("Step", "right"),
        Column("At", "right"),
    )
    caption = "The longest gaps, and the activity that ended each."
    return Table(columns, tuple(rows), caption=caption, terminal_rows=0)


def _edges(trace: Trace, pieces: pd.DataFrame) -> str:
    """Say how long the devices were idle before the first activity and after the last."""
    edges = pieces[pieces["edge"].notna().to_numpy(bool)]
    if edges.empty:
        return ""
    total_ns = int(edges["duration_ns"].sum())
    listed = ", ".join(
        f"{_name(trace, cause)} {format_time(time_ns)}"
        for cause, time_ns in group_idle(edges)[["cause", "time_ns"]].to_numpy(dtype=object)
    )
    return (
        f"{format_time(total_ns)} of the idle time is before the first activity or after the "
        f"last: {listed}."
    )


def _around_operators(trace: Trace) -> str:
    """Say how long no operator of a host ran at the ends of its steps: no gap tells of it."""
    if not trace.is_host_only:
        return ""
    split = split_steps(trace)
    idle_ns = int(split["time_ns"][split["is_idle"]].sum())
    around_ns = idle_ns - int(idle_in_steps(trace)["duration_ns"].sum())
    if around_ns <= 0:
        return ""
    if around_ns == int(split["time_ns"].sum()):
        return f"No operator ran in the steps, which lasted {format_time(around_ns)}."
    return (
        f"No operator ran for {format_time(around_ns)} more, from the begin of the steps to the "
        "first operator and from the last one to their end."
    )


def _exposed(trace: Trace) -> str:
    """Say how long collectives ran only to wait for a rank that came later."""
    waits = find_exposed_waits(trace)
    if not waits:
        return ""
    exposed = np.array([wait.exposed_ns for wait in waits])
    most, least = int(exposed.argmax()), int(exposed.argmin())
    return (
        "Not counted as idle: collectives waited for ranks that had not begun them, with nothing "
        f"else on the device, for {format_time(exposed[most])} on rank {waits[most].rank} and "
        f"{format_time(exposed[least])} on rank {waits[least].rank}, for which the others waited "
        "most."
    )
