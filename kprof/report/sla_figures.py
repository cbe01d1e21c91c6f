"""Figures of a service: distributions with their limit, the time to the first N tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kprof.analyze.sla.curves import TokenCurve
from kprof.analyze.sla.verdict import Judgement
from kprof.report.figures import literal
from kprof.report.section import Figure
from kprof.report.units import format_share, format_time

CDF_COLOUR, LIMIT_COLOUR, BOUND_COLOUR = "#4c78a8", "#d8443c", "#8c8c94"
LEVEL_COLOURS = ("#54a24b", "#f58518", "#4c78a8")


def draw_distribution(
    judgement: Judgement, points: list[tuple[float, float]], bound: float | None
) -> Figure:
    """Draw the share of the requests that are at or below each time, and the limit."""
    target = judgement.target
    line: dict[str, object] = {
        "type": "scatter",
        "mode": "lines",
        "name": "share of the requests",
        "x": [round(time / 1e6, 4) for time, _ in points],
        "y": [round(100 * share, 4) for _, share in points],
        "line": {"color": CDF_COLOUR, "width": 2, "shape": "hv"},
    }
    shapes: list[dict[str, object]] = [_vertical(target.limit, LIMIT_COLOUR, "dash")]
    notes = [_note(target.limit, f"limit {format_time(target.limit)}")]
    if bound is not None and math.isfinite(bound):
        shapes.append(_vertical(bound, BOUND_COLOUR, "dot"))
    if target.quantile is not None:
        level = 100 * float(target.quantile)
        shapes.append({**_LEVEL, "y0": level, "y1": level})
    layout = {
        **_LAYOUT,
        "xaxis": {"title": {"text": "ms"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "% at or below"}, "range": [0, 101]},
        "shapes": shapes,
        "annotations": notes,
        "showlegend": False,
    }
    caption = (
        f"{target.text}: {judgement.verdict.lower()}. Dashed: the limit; dotted: the 99 % bound of "
        "the percentile. What failed never arrives, so the curve may end below 100 %."
    )
    return Figure([line], layout, caption, height_px=320)


_LAYOUT: dict[str, object] = {"margin": {"l": 64, "r": 20, "t": 24, "b": 46}}
_LEVEL: dict[str, object] = {
    "type": "line",
    "xref": "paper",
    "x0": 0,
    "x1": 1,
    "line": {"color": BOUND_COLOUR, "width": 1},
}


def _vertical(time_ns: float, colour: str, dash: str) -> dict[str, object]:
    place: dict[str, object] = {"type": "line", "yref": "paper", "y0": 0, "y1": 1}
    at = {"x0": time_ns / 1e6, "x1": time_ns / 1e6}
    return {**place, **at, "line": {"color": colour, "width": 2, "dash": dash}}


def _note(time_ns: float, text: str) -> dict[str, object]:
    place = {"x": time_ns / 1e6, "y": 1, "yref": "paper", "yanchor": "bottom"}
    return {**place, "text": literal(text), "showarrow": False}


def draw_token_curve(curve: TokenCurve) -> Figure:
    """Draw the percentiles of the time to the first N tokens over N."""
    lines = [
        _token_line(curve.num_tokens, points, name, colour)
        for (name, points), colour in zip(curve.by_level.items(), LEVEL_COLOURS, strict=True)
    ]
    bound = _token_line(curve.num_tokens, curve.high_p99, "p99, 99 % bound", BOUND_COLOUR)
    bound["line"] = {"color": BOUND_COLOUR, "width": 1.5, "dash": "dot"}
    layout = {
        **_LAYOUT,
        "xaxis": {"title": {"text": "first N tokens"}},
        "yaxis": {"title": {"text": "ms"}, "rangemode": "tozero"},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
    }
    short = curve.share_short[-1]
    caption = (
        "How long the first N tokens take. Answers complete with fewer than N are left out of a "
        f"point: {format_share(short)} of the requests at N = {curve.num_tokens[-1]}. A line ends "
        "where too many failed, the bound where samples are too few."
    )
    return Figure([*lines, bound], layout, caption)


def _token_line(
    places: Sequence[int], points: Sequence[float | None], name: str, colour: str
) -> dict[str, object]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": list(places),
        "y": [None if point is None else round(point / 1e6, 4) for point in points],
        "line": {"color": colour, "width": 2, "shape": "hv"},
    }
