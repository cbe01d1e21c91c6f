"""Where a step's time goes: every instant of the window once, adding up to 100 %."""

from __future__ import annotations

import pandas as pd

from kprof.analyze.attribution.steps import (
    IMBALANCE,
    count_gpu_steps,
    denominator,
    find_lead,
    measure_communication,
    split_steps,
)
from kprof.analyze.groupings import measure_capacity
from kprof.report.figures import (
    GREY,
    IDLE_COLOUR,
    UNKNOWN_COLOUR,
    Drawn,
    colours_of,
    literal,
    margins,
)
from kprof.report.section import Column, Figure, Part, Section, Table, Text
from kprof.report.units import (
    format_count,
    format_exact,
    format_share,
    format_time,
    of_all,
    round_shares,
)
from kprof.trace import Trace

TITLE = "Where the time goes"
ORDER = 30

NO_KIND = "of no known kind"
NO_CAUSE = "cause unknown"
HOST_IDLE = "between operators"
NO_PHASE = "no phase known"


def render(trace: Trace) -> Section:
    """Render the elapsed time by kind and cause of idleness, as a whole and by phase."""
    split = split_steps(trace)
    if split.empty:
        return Section(TITLE, ORDER, (Text("The trace holds no time to divide."),))
    split = split.assign(part=_labels(split, trace), phase=split["phase"].fillna(NO_PHASE))
    by_part = _sum_by(split, ["part", "is_idle"])
    by_phase = _sum_by(split, ["phase"])
    parts: list[Part] = [Text(_lead(trace, by_part)), _bars(split, by_part, by_phase)]
    parts.append(_part_table(trace, by_part))
    parts += _communication(trace)
    if len(by_phase) > 1:
        parts.append(_phase_table(split, by_phase))
    return Section(TITLE, ORDER, tuple(parts))


def _labels(split: pd.DataFrame, trace: Trace) -> pd.Series[str]:
    named = zip(split["part"], split["is_idle"], strict=True)
    labels = [
        label_of(None if pd.isna(part) else str(part), is_idle=is_idle, in_host=trace.is_host_only)
        for part, is_idle in named
    ]
    return pd.Series(labels, index=split.index, dtype=object)


def label_of(part: str | None, *, is_idle: bool, in_host: bool) -> str:
    """Name a kind of activity, or a cause of idle time; None is an unknown one."""
    if not is_idle:
        return part or NO_KIND
    if part == IMBALANCE:
        return IMBALANCE
    return HOST_IDLE if part is None and in_host else f"idle ({part or NO_CAUSE})"


def _sum_by(split: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    sums = split.groupby(by)["time_ns"].sum().reset_index()
    ordered: pd.DataFrame = sums.sort_values("time_ns", ascending=False, kind="stable")
    return ordered


def _lead(trace: Trace, by_part: pd.DataFrame) -> str:
    total_ns = int(by_part["time_ns"].sum())
    shares = round_shares([int(time_ns) for time_ns in by_part["time_ns"]])
    parts = [
        f"{share} {part}"
        for part, share in zip(by_part["part"], shares, strict=True)
        # In host mode the first sentence tells it.
        if part != HOST_IDLE
    ]
    listed = ", ".join(parts[:3])
    if not trace.has_timeline:
        return f"Most of the device time: {listed}. Idle time is not known."
    # Nothing is recorded of the time by which other GPUs take longer.
    idle_ns = int(by_part["time_ns"][by_part["is_idle"] & (by_part["part"] != IMBALANCE)].sum())
    share = format_share(idle_ns / total_ns)
    if trace.is_host_only:
        rest = f" The largest parts are {listed}." if listed else ""
        return f"No operator ran for {share} of the time.{rest}"
    return f"Most of the time: {listed}. The GPU was idle for {share} of it."


def _part_table(trace: Trace, by_part: pd.DataFrame) -> Table:
    times = [int(time_ns) for time_ns in by_part["time_ns"]]
    total_ns = sum(times)
    num_steps = count_gpu_steps(trace)
    columns = [
        Column("Operator kind" if trace.is_host_only else "Activity"),
        Column("Share", "right"),
        Column("Time", "right"),
    ]
    rows = [
        [str(part), share, format_time(time_ns)]
        for part, share, time_ns in zip(by_part["part"], round_shares(times), times, strict=True)
    ]
    rows.append(["all", "100.0 %", format_time(total_ns)])
    together, per_step = of_all(trace), ""
    if num_steps:
        columns.append(Column("Per step", "right", essential=False))
        for row, time_ns in zip(rows, [*times, total_ns], strict=True):
            row.append(format_time(time_ns / num_steps))
        per_step = f" Per step: over {format_count(num_steps, 'step')}{together}.{_edges(trace)}"
    whole, overlap = "device time", ""
    if trace.has_timeline:
        overlap = (
            " Where activities overlap, an instant belongs to computation before a collective "
            "before a copy before a memset; within one class, to the activity that ends last."
        )
        whole = "steps" if num_steps else "window"
        if denominator(trace).imbalance_ns:
            unit = "A step" if num_steps else "The window"
            overlap += (
                f" {unit} lasts as long as on the GPU where it is longest. The difference to the "
                f"other GPUs is {IMBALANCE}, of which nothing is recorded."
            )
    return Table(
        columns=tuple(columns),
        rows=tuple(tuple(row) for row in rows),
        caption=(
            f"Adds up to the {whole} of {format_exact(total_ns)}{together}.{overlap}{per_step}"
        ),
        share=(*(time_ns / total_ns for time_ns in times), 0.0),
        terminal_rows=20,
        has_total=True,
    )


def _edges(trace: Trace) -> str:
    """Say how the steps differ from the window of the device, which the ledger divides."""
    lead_ns = find_lead(trace).time_ns
    parts = []
    if lead_ns:
        what = "before the first step and after the last"
        parts.append(f"without {format_time(lead_ns)} {what}")
    whole = denominator(trace)
    edge_ns = whole.time_ns - whole.imbalance_ns + lead_ns - measure_capacity(trace.kernels)
    if edge_ns:
        parts.append(f"with {format_time(edge_ns)} of idle time before and after it")
    of = "operators'" if trace.is_host_only else "device's"
    return f" This is the {of} window {' and '.join(parts)}." if parts else ""


def _communication(trace: Trace) -> list[Part]:
    """Return total, hidden and exposed communication of the steps, where any was recorded."""
    found = measure_communication(trace)
    if not found.total_ns or found.hidden_ns is None or found.exposed_ns is None:
        return []
    num_steps = count_gpu_steps(trace)
    rows = [
        (name, format_share(time_ns / found.total_ns), format_time(time_ns))
        + ((format_time(time_ns / num_steps),) if num_steps else ())
        for name, time_ns in (
            ("total", found.total_ns),
            ("hidden", found.hidden_ns),
            ("exposed", found.exposed_ns),
        )
    ]
    headers = ("Share", "Time", *(("Per step",) if num_steps else ()))
    caption = "Collectives: each instant of a device once. Hidden: overlapped by computation."
    columns = (Column("Communication"), *(Column(header, "right") for header in headers))
    return [Table(columns, tuple(rows), caption)]


def _phase_table(split: pd.DataFrame, by_phase: pd.DataFrame) -> Table:
    idle = split[split["is_idle"]].groupby("phase")["time_ns"].sum().to_dict()
    times = [int(time_ns) for time_ns in by_phase["time_ns"]]
    shares = round_shares(times)
    rows = [
        (
            str(phase),
            share,
            format_time(time_ns),
            format_time(time_ns - int(idle.get(phase, 0))),
            format_time(int(idle.get(phase, 0))),
        )
        for phase, share, time_ns in zip(by_phase["phase"], shares, times, strict=True)
    ]
    headers = ("Share", "Time", "Busy", "Idle")
    return Table(
        columns=(Column("Phase"), *(Column(header, "right") for header in headers)),
        rows=tuple(rows),
        caption="By phase. Idle time belongs to the phase of the activity that ended it.",
        share=tuple(time_ns / sum(times) for time_ns in times),
    )


def _bars(split: pd.DataFrame, by_part: pd.DataFrame, by_phase: pd.DataFrame) -> Figure:
    """Draw one bar for everything and one a phase, stacked by part; lengths are shares."""
    total_ns = int(by_part["time_ns"].sum())
    phases = by_phase["phase"].tolist() if len(by_phase) > 1 else []
    bars = ["everything", *phases]
    busy = by_part["part"][~by_part["is_idle"]].tolist()
    colours = colours_of(str(part) for part in busy)
    cells = split.groupby(["part", "phase"])["time_ns"].sum().to_dict()
    ordered = by_part.sort_values(["is_idle", "time_ns"], ascending=[True, False], kind="stable")
    data = []
    for row in ordered.itertuples(index=False):
        times = [int(row.time_ns), *(int(cells.get((row.part, phase), 0)) for phase in phases)]
        data.append(_bar(str(row.part), bool(row.is_idle), bars, times, total_ns, colours))
    layout: Drawn = {
        "barmode": "stack",
        "bargap": 0.35,
        "margin": margins(left=110, bottom=40),
        "xaxis": {"ticksuffix": " %", "range": [0, 100], "fixedrange": True},
        "yaxis": {"autorange": "reversed", "fixedrange": True},
        "legend": {"orientation": "h", "y": -0.16, "traceorder": "normal"},
        "hovermode": "closest",
    }
    caption = "Shares of all time: all phases, then each phase. Hatched: idle."
    return Figure(data, layout, caption, height_px=190 + 42 * len(bars))


def _bar(
    part: str,
    is_idle: bool,
    bars: list[str],
    times: list[int],
    total_ns: int,
    colours: dict[str, str],
) -> Drawn:
    colour = IDLE_COLOUR if is_idle else colours.get(part, UNKNOWN_COLOUR)
    marker: Drawn = {"color": colour}
    if is_idle:
        marker["pattern"] = {"shape": "/", "fgcolor": GREY, "size": 6}
    shares = [time_ns / total_ns for time_ns in times]
    hover = [
        f"{literal(bar)}: {literal(part)}<br>{format_share(share)}, {format_time(time_ns)}"
        for bar, share, time_ns in zip(bars, shares, times, strict=True)
    ]
    return {
        "type": "bar",
        "orientation": "h",
        "name": literal(part),
        "y": [literal(bar) for bar in bars],
        "x": [round(100 * share, 3) for share in shares],
        "marker": marker,
        "hovertext": hover,
        "hoverinfo": "text",
    }
