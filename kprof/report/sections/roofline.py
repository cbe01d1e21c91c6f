"""The roofline: what each operator achieved against what the device could do."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pandas as pd

from kprof.analyze.capture_quality.unanswered import why_no_work
from kprof.analyze.groupings import group_operators
from kprof.device import Device
from kprof.errors import three_digits
from kprof.report.figures import (
    BOUND_COLOURS,
    CEILING_COLOUR,
    LEGEND_ABOVE,
    UNKNOWN_COLOUR,
    Drawn,
    axis,
    curve,
    literal,
    margins,
    mark_place,
)
from kprof.report.kernel_names import readable
from kprof.report.section import Figure, Part, Section, Text
from kprof.report.units import (
    format_amount,
    format_count,
    format_share,
    format_share_of_limit,
    format_time,
    shorten,
    whose_time,
)
from kprof.trace import Trace

TITLE = "Roofline"
ORDER = 40
# Curves and points, which a terminal cannot show.
FOR_PAGE_ONLY = True

MARKERS = 300
BARS = 15
UNKNOWN_BOUND = "unknown"

_FIRST_SHAPE = re.compile(r"\[(\d[\d, ]*)\]")


def render(trace: Trace) -> Section:
    """Render arithmetic intensity against speed, and the bandwidth of what computes nothing."""
    groups = group_operators(trace)
    # A group without time has no speed.
    groups = groups[(groups["bytes"].fillna(0) > 0) & (groups["time_ns"] > 0)]
    if groups.empty:
        why = why_no_work(trace)
        text = why.sentence if why else "kprof has no work model of any operator that took time."
        return Section(TITLE, ORDER, (Text(f"No roofline can be drawn. {text}"),), False)
    computing = groups[groups["flops"].fillna(0) > 0]
    moving = groups[groups["flops"].fillna(0) == 0]
    parts: list[Part] = [Text(_lead(trace, groups))]
    if trace.meta.device is None:
        parts.append(Text("The GPU's peaks are not known, so no ceiling is drawn.", "warning"))
    if len(computing):
        parts.append(_roofline_figure(trace, computing.head(MARKERS), len(computing)))
    if len(moving):
        parts.append(_bandwidth_figure(trace.meta.device, moving))
    return Section(TITLE, ORDER, tuple(parts), in_terminal=False)


def _lead(trace: Trace, groups: pd.DataFrame) -> str:
    total_ns = max(int(trace.kernels["duration_ns"].sum()), 1)
    covered = format_share(int(groups["time_ns"].sum()) / total_ns)
    by_bound = groups.groupby(groups["bound"].astype(object))["time_ns"].sum()
    listed = ", ".join(
        f"{format_share(time_ns / total_ns)} {bound}-bound"
        for bound, time_ns in by_bound.sort_values(ascending=False).items()
    )
    ending = f": {listed}." if listed else "."
    time = whose_time(is_host_only=trace.is_host_only)
    return f"The bytes moved are known for {covered} of {time}{ending}"


def _roofline_figure(trace: Trace, points: pd.DataFrame, number: int) -> Figure:
    flops = points["flops"].to_numpy(np.float64)
    intensity = flops / points["bytes"].to_numpy(np.float64)
    speed = flops / (points["time_ns"].to_numpy(np.float64) / 1e9)
    data: list[Drawn] = []
    if trace.meta.device is not None:
        data += _ceilings(trace.meta.device, trace.kernels, intensity)
    bounds = points["bound"].astype(object).fillna(UNKNOWN_BOUND).to_numpy()
    for bound in (*BOUND_COLOURS, UNKNOWN_BOUND):
        rows = np.flatnonzero(bounds == bound)
        if len(rows):
            data.append(_markers(bound, points.iloc[rows], intensity[rows], speed[rows]))
    cut = f" the {MARKERS} longest of {number:,};" if number > MARKERS else ""
    caption = (
        f"A marker is a kernel with its operator and shapes;{cut} its area is its share of the "
        "time. The lines are the GPU's ceilings: the closer, the better the GPU is used."
    )
    return Figure(data, _roofline_layout(), caption, height_px=520)


def _roofline_layout() -> Drawn:
    tens = [10.0**power for power in range(-6, 19)]
    return {
        "margin": margins(left=100, bottom=50),
        "xaxis": {
            **axis("FLOP per byte", type="log"),
            "tickvals": tens,
            "ticktext": [f"{ten:,.6g}" for ten in tens],
        },
        "yaxis": {
            "type": "log",
            "tickvals": tens,
            "ticktext": [format_amount(ten, "FLOP/s") for ten in tens],
        },
        "legend": {**LEGEND_ABOVE, "itemsizing": "constant"},
        "hovermode": "closest",
    }


def _markers(bound: str, points: pd.DataFrame, intensity: np.ndarray, speed: np.ndarray) -> Drawn:
    shares = points["share"].to_numpy(np.float64)
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"{bound}-bound" if bound != UNKNOWN_BOUND else "bound not known",
        "x": [float(f"{value:.4g}") for value in intensity],
        "y": [float(f"{value:.4g}") for value in speed],
        "marker": {
            "color": BOUND_COLOURS.get(bound, UNKNOWN_COLOUR),
            "size": [round(float(size), 1) for size in np.clip(70 * np.sqrt(shares), 5, 60)],
            "opacity": 0.75,
            "line": {"width": 1, "color": "rgba(127,127,127,0.5)"},
        },
        "hovertext": [
            _hover_text(
                row, f"{format_amount(achieved, 'FLOP/s')}, {three_digits(per_byte)} FLOP/B"
            )
            for row, achieved, per_byte in zip(
                points.itertuples(index=False), speed, intensity, strict=True
            )
        ],
        "hoverinfo": "text",
    }


def _hover_text(group: Any, achieved: str) -> str:  # noqa: ANN401 - a named tuple of pandas
    shapes = "" if pd.isna(group.shapes) else f" {shorten(str(group.shapes), 70)}"
    op = "operator not known" if pd.isna(group.op) else str(group.op)
    limit = format_share_of_limit(group)
    lines = (
        shorten(readable(str(group.name)), 80),
        f"{op}{shapes}",
        f"{format_count(group.calls, 'call')}, {format_time(group.time_ns)}, "
        f"{format_share(group.share)} of the time",
        f"{achieved}; {limit} of the roofline",
    )
    return "<br>".join(literal(line) for line in lines)


def _ceilings(device: Device, kernels: pd.DataFrame, intensity: np.ndarray) -> list[Drawn]:
    """Draw the memory's slope and, for each type that computes, its peak."""
    computes = kernels["flops"].fillna(0) > 0
    used = [str(dtype) for dtype in kernels["dtype"][computes].dropna().unique()]
    peaks = {dtype: device.flops_per_s[dtype] for dtype in used if dtype in device.flops_per_s}
    if not peaks:
        return []
    bandwidth = device.memory_bytes_per_s
    ridge = max(peaks.values()) / bandwidth
    left = min(float(intensity.min()), ridge) / 3
    right = max(float(intensity.max()), ridge) * 4
    slope = _ceiling(
        [left, ridge],
        [left * bandwidth, ridge * bandwidth],
        f"memory {format_amount(bandwidth, 'B/s')}",
    )
    flats = [
        _ceiling(
            [peak / bandwidth, right], [peak, peak], f"{dtype} {format_amount(peak, 'FLOP/s')}"
        )
        for dtype, peak in sorted(peaks.items(), key=lambda item: -item[1])
    ]
    for flat in flats:
        flat.update(mode="lines+text", text=["", flat["name"]], textposition="top left")
    return [slope, *flats]


def _ceiling(x: list[float], y: list[float], name: str) -> Drawn:
    is_slope = not math.isclose(y[0], y[1])
    dash = "solid" if is_slope else "dash"
    line = curve(literal(name), x, y, CEILING_COLOUR, width=2, dash=dash)
    return {**line, "hoverinfo": "name", "showlegend": is_slope}


def _bandwidth_figure(device: Device | None, moving: pd.DataFrame) -> Figure:
    """Draw bytes per second of the longest groups that compute nothing."""
    shown = moving.head(BARS)
    speed = shown["bytes"].to_numpy(np.float64) / (shown["time_ns"].to_numpy(np.float64) / 1e9)
    names = [_short_name(row) for row in shown.itertuples(index=False)]
    data: list[Drawn] = [
        {
            "type": "bar",
            "orientation": "h",
            "x": [float(f"{value:.4g}") for value in speed],
            "y": list(range(len(shown))),
            "marker": {"color": BOUND_COLOURS["memory"]},
            "hovertext": [
                _hover_text(row, format_amount(achieved, "B/s"))
                for row, achieved in zip(shown.itertuples(index=False), speed, strict=True)
            ],
            "hoverinfo": "text",
        }
    ]
    layout: Drawn = {
        "margin": margins(left=250, top=24),
        "xaxis": {
            "ticksuffix": "B/s",
            "exponentformat": "SI",
            "rangemode": "tozero",
        },
        "yaxis": {
            "tickvals": list(range(len(shown))),
            "ticktext": [literal(shorten(readable(name), 36)) for name in names],
            "autorange": "reversed",
            "fixedrange": True,
        },
        "showlegend": False,
    }
    ceiling = ""
    if device is not None:
        layout["shapes"] = [
            mark_place(device.memory_bytes_per_s, CEILING_COLOUR, width=2, dash="dash")
        ]
        ceiling = f" The line is the memory's {format_amount(device.memory_bytes_per_s, 'B/s')}."
    caption = (
        f"Bandwidth of kernels that only move data: the {len(shown)} longest of "
        f"{format_count(len(moving), 'group')} by kernel, operator, shapes and bound.{ceiling}"
    )
    return Figure(data, layout, caption, height_px=110 + 24 * len(shown))


def _short_name(group: Any) -> str:  # noqa: ANN401 - a named tuple of pandas
    name = str(group.name if pd.isna(group.op) else group.op)
    shape = _FIRST_SHAPE.search("" if pd.isna(group.shapes) else str(group.shapes))
    return f"{name} [{shape[1]}]" if shape else name
