"""The figure layer: the colours, lines and layouts of which every plotly figure is made."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Mid tones, legible on white and on black.
BLUE = "#4c78a8"
ORANGE = "#f58518"
TEAL = "#3fa9a5"
GREEN = "#54a24b"
PURPLE = "#a56ba0"
BROWN = "#a67c61"
GREY = "#8c8c94"
RED = "#d8443c"
PALE = "#b3bfd1"
_KIND_COLOURS = {
    "gemm": BLUE,
    "attention": ORANGE,
    "convolution": TEAL,
    "norm": GREEN,
    "softmax": "#d6b12d",
    "elementwise": PURPLE,
    "reduction": "#ee8a90",
    "embedding": BROWN,
    "indexing": "#d0598c",
    "copy": GREY,
    "set": "#b9a58e",
    "optimizer": "#7f6bd0",
    "collective": RED,
    "loss": "#5fa3d8",
    "sort": "#8bb33d",
    "random": "#c08a3e",
    "other": "#9a9389",
}
_SPARE_COLOURS = ("#1f9e89", "#c2578b", "#6a8f2f", "#b5651d", "#5b6ee1")

BOUND_COLOURS = {"memory": BLUE, "compute": ORANGE, "issue": PURPLE, "latency": GREY}
UNKNOWN_COLOUR = "#b8b8b8"
IDLE_COLOUR = "#c9c9cf"
CEILING_COLOUR = GREY
# Lines of one figure that stand side by side, such as GPUs, in this order.
SERIES_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, TEAL, BROWN, GREY)

# A part of a plotly figure, as its plain JSON object.
Drawn = dict[str, Any]

LEGEND_ABOVE: Mapping[str, object] = {"orientation": "h", "y": 1.02, "yanchor": "bottom"}


def literal(name: object) -> str:
    """Return an untrusted name as plotly shows it unchanged: it reads text as a kind of HTML."""
    return html.escape(str(name), quote=False)


def colours_of(kinds: Iterable[str]) -> dict[str, str]:
    """Return a colour for each kind: always the same for a known one."""
    strange = sorted(set(kinds) - _KIND_COLOURS.keys())
    spare = {kind: _SPARE_COLOURS[i % len(_SPARE_COLOURS)] for i, kind in enumerate(strange)}
    return {**_KIND_COLOURS, **spare}


def margins(left: int = 70, top: int = 10, bottom: int = 46) -> Drawn:
    """Return the room for labels around a figure, in pixels."""
    return {"l": left, "r": 20, "t": top, "b": bottom}


def axis(label: str, **more: object) -> Drawn:
    """Return an axis with its label, which holds the unit."""
    return {"title": {"text": label}, **more}


def curve(
    name: str, x: Sequence[float], y: Sequence[float | None], colour: str, **line: object
) -> Drawn:
    """Return a line through points; with `shape="hv"` a value holds until the next."""
    stroke = {"color": colour, "width": 1.5, **line}
    return {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": y, "line": stroke}


def mark_level(y: float, colour: str, **line: object) -> Drawn:
    """Return a line across the figure at a value of y."""
    return {"type": "line", **_ACROSS, "y0": y, "y1": y, "line": {"color": colour, **line}}


def mark_place(x: float, colour: str, **line: object) -> Drawn:
    """Return a line from the bottom to the top of the figure at a value of x."""
    return {"type": "line", **_UP, "x0": x, "x1": x, "line": {"color": colour, **line}}


def shade_levels(low: float, high: float, colour: str, opacity: float) -> Drawn:
    """Return a band across the figure, below its lines."""
    return {"type": "rect", **_ACROSS, "y0": low, "y1": high, **_filled(colour, opacity)}


def shade_places(low: float, high: float, colour: str, opacity: float) -> Drawn:
    """Return a band from the bottom to the top of the figure, below its lines."""
    return {"type": "rect", **_UP, "x0": low, "x1": high, **_filled(colour, opacity)}


_ACROSS: Drawn = {"xref": "paper", "x0": 0, "x1": 1}
_UP: Drawn = {"yref": "paper", "y0": 0, "y1": 1}


def _filled(colour: str, opacity: float) -> Drawn:
    return {"fillcolor": colour, "opacity": opacity, "line": {"width": 0}, "layer": "below"}
