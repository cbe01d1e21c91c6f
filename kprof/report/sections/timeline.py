"""The timeline of one step: host threads above streams."""

from __future__ import annotations

import pandas as pd

from kprof.analyze.attribution.steps import find_steps, median_step
from kprof.analyze.capture_quality.unanswered import why_no_timeline
from kprof.analyze.lanes import device_rows, host_rows, merge_small
from kprof.report.figures import (
    LEGEND_ABOVE,
    PALE,
    UNKNOWN_COLOUR,
    Drawn,
    axis,
    colours_of,
    literal,
    margins,
)
from kprof.report.kernel_names import readable
from kprof.report.section import Figure, Section, Text
from kprof.report.units import format_count, format_time, shorten
from kprof.trace import Trace

TITLE = "Timeline"
ORDER = 70
# Curves and points, which a terminal cannot show.
FOR_PAGE_ONLY = True

MAX_ITEMS = 3000
NO_KIND = "other"
HOST_COLOURS = {"phase": "#7f8fa9", "module": PALE, "range": "#9fc3b4"}


def render(trace: Trace) -> Section:
    """Render the step of median duration, or all of a trace that has no steps."""
    if trace.kernels.empty:
        return Section(TITLE, ORDER, (Text("No activity was recorded: nothing to draw."),), False)
    if why := why_no_timeline(trace):
        return Section(TITLE, ORDER, (Text(why.sentence),), False)
    rank, start_ns, end_ns, what = _extent(trace)
    span_ns = end_ns - start_ns
    host = host_rows(trace, rank, start_ns, end_ns)
    device = device_rows(trace, rank, start_ns, end_ns)
    shown_host = merge_small(host, span_ns, MAX_ITEMS // 3)
    shown_device = merge_small(device, span_ns, MAX_ITEMS - len(shown_host))
    shown = pd.concat(
        [_labelled(shown_host, trace.ranges), _labelled(shown_device, trace.kernels)],
        ignore_index=True,
    )
    number = format_count(len(device), "activity", "activities")
    caption = _caption(len(host) + len(device), int((shown["merged"] == 1).sum()))
    figure = _figure(shown, start_ns, span_ns, caption)
    lead = Text(f"{what}: {number} in {format_time(span_ns)}.")
    return Section(TITLE, ORDER, (lead, figure), in_terminal=False)


def _extent(trace: Trace) -> tuple[int, int, int, str]:
    """Return rank, start and end of what is drawn, and its name."""
    steps = find_steps(trace)
    if steps:
        step = median_step(steps)
        name = f"Step {step.number}" if step.number >= 0 else "One step"
        what = f"{name}, of median duration among {len(steps)}"
        return step.rank, step.start_ns, step.device_end_ns, what
    kernels = trace.kernels
    rank = int(kernels["rank"].min())
    mine = kernels[(kernels["rank"] == rank).to_numpy()]
    end_ns = int((mine["start_ns"] + mine["duration_ns"]).max())
    return rank, int(mine["start_ns"].min()), end_ns, "No step is marked, so all of the trace"


def _caption(number: int, num_alone: int) -> str:
    caption = "Drag to zoom in, double-click to zoom out."
    if number == num_alone:
        return caption
    return (
        f"{caption} {number - num_alone:,} of {number:,} are too short to see and are merged with "
        "their neighbours; such a block includes the idle time between them."
    )


def _labelled(rows: pd.DataFrame, source: pd.DataFrame) -> pd.DataFrame:
    """Add `label` and `group`: the name and the kind of each row in its table."""
    found = source[["name", "kind"]].iloc[rows["row"].to_numpy()]
    group = found["kind"].astype(object).fillna(NO_KIND).tolist()
    labelled: pd.DataFrame = rows.assign(
        lane=rows["lane"].astype(object), label=found["name"].astype(object).tolist(), group=group
    )
    return labelled


def _figure(shown: pd.DataFrame, start_ns: int, span_ns: int, caption: str) -> Figure:
    lanes = sorted(set(shown["lane"]), key=lambda lane: (not lane.startswith("host"), lane))
    position = {lane: i for i, lane in enumerate(lanes)}
    colours = {**colours_of(set(shown["group"]) - HOST_COLOURS.keys()), **HOST_COLOURS}
    lengths = (shown["end_ns"] - shown["start_ns"]).groupby(shown["group"]).sum()
    # Drawn last, the groups that take most of the time win a pixel that several share.
    groups = lengths.sort_values(kind="stable").index
    data = [
        _bars(str(group), shown[shown["group"] == group], position, start_ns, colours)
        for group in groups
    ]
    return Figure(
        data, _layout(lanes, round(span_ns / 1e6, 6)), caption, height_px=150 + 30 * len(lanes)
    )


def _layout(lanes: list[str], span_ms: float) -> Drawn:
    # The levels of one thread stand under its name.
    names = [lane.split(", level 1")[0] if ", level " in lane else lane for lane in lanes]
    return {
        "barmode": "overlay",
        "margin": margins(left=130),
        "xaxis": axis("milliseconds", range=[0, span_ms], zeroline=False),
        "yaxis": {
            "tickvals": list(range(len(lanes))),
            "ticktext": ["" if ", level " in name else literal(name) for name in names],
            "autorange": "reversed",
            "fixedrange": True,
            "zeroline": False,
            "showgrid": False,
        },
        "legend": {**LEGEND_ABOVE, "traceorder": "reversed"},
        "hovermode": "closest",
        "dragmode": "zoom",
        # A name that does not fit its bar is hidden until a zoom makes room.
        "uniformtext": {"mode": "hide", "minsize": 10},
    }


def _bars(
    group: str,
    rows: pd.DataFrame,
    position: dict[str, int],
    start_ns: int,
    colours: dict[str, str],
) -> Drawn:
    lengths = (rows["end_ns"] - rows["start_ns"]).tolist()
    bars: Drawn = {
        "type": "bar",
        "orientation": "h",
        "name": literal(group),
        "base": [round((start - start_ns) / 1e6, 6) for start in rows["start_ns"].tolist()],
        "x": [round(length / 1e6, 6) for length in lengths],
        "y": [position[lane] for lane in rows["lane"]],
        "width": 0.82,
        "marker": {"color": colours.get(group, UNKNOWN_COLOUR), "line": {"width": 0}},
        "hovertext": [
            _hover_text(label, merged, length)
            for label, merged, length in zip(rows["label"], rows["merged"], lengths, strict=True)
        ],
        "hoverinfo": "text",
    }
    if group in HOST_COLOURS:
        labels = [literal(shorten(readable(str(label)), 48)) for label in rows["label"]]
        bars.update(text=labels, textposition="inside", insidetextanchor="start")
        bars.update(textfont={"size": 11, "color": "#1d1f24"}, textangle=0)
    return bars


def _hover_text(label: object, merged: int, length_ns: int) -> str:
    name = literal(shorten(readable(str(label)), 90))
    if merged == 1:
        return f"{name}<br>{format_time(length_ns)}"
    return f"{merged} merged, the longest {name}<br>{format_time(length_ns)} from first to last"
