"""A chart of lines over a measured quantity, with the limit that they are to keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kprof.report.partner.drawings import FAR, Axis, ticks
from kprof.report.partner.parts import Anchor, Drawing, Mark, Shape, Stroke, Symbol, Words

MOST_MARKS = 6


@dataclass(frozen=True)
class Line:
    """A line through points, from left to right; a symbol tells it from others, not its colour."""

    name: str
    points: tuple[tuple[float, float], ...]
    style: str
    symbol: Symbol

    @property
    def legend(self) -> tuple[str, str]:
        """Its entry in a legend."""
        return f"{self.style} {self.symbol}", self.name


@dataclass(frozen=True)
class Limits:
    """Where the line of the limit lies: at a height, or at a place from the left."""

    name: str
    height: float | None = None
    place: float | None = None


@dataclass(frozen=True)
class Scale:
    """What an axis measures, and in which unit."""

    label: str
    unit: str = ""
    top: float | None = None
    """Where it ends; None: at the largest value, or at three times the limit."""


def chart(
    lines: Sequence[Line], width: int, across: Scale, upward: Scale, limit: Limits
) -> Drawing:
    """Draw lines from zero on; what lies far beyond the limit is cut."""
    left, right, top, bottom = 64.0, width - 10.0, 26.0, 250.0
    x_axis = Axis(0.0, _end(across, [x for one in lines for x, _ in one.points], limit.place),
                  left, right)  # fmt: skip
    y_axis = Axis(0.0, _end(upward, [y for one in lines for _, y in one.points], limit.height),
                  bottom, top)  # fmt: skip
    shapes: list[Shape] = [Words(0, 12, upward.label, style="soft")]
    for value in ticks(0.0, y_axis.high):
        y = y_axis(value)
        shapes.append(Stroke(((left, y), (right, y)), "grid" if value else "axis"))
        shapes.append(Words(left - 6, y + 4, f"{value:,g}{upward.unit}", "end", "soft"))
    for value in ticks(0.0, x_axis.high, 4 if width < 500 else 8):
        label = f"{value:,g}{across.unit}"
        shapes.append(Words(x_axis(value), bottom + 18, label, "middle", "soft"))
    shapes.append(Words(right, bottom + 36, across.label, "end", "soft"))
    shapes += _limit(limit, x_axis, y_axis)
    for line in lines:
        shapes += _line(line, (x_axis, across), (y_axis, upward))
    return Drawing(width, bottom + 44, tuple(shapes))


def _end(scale: Scale, values: Sequence[float], limit: float | None) -> float:
    if scale.top is not None:
        return scale.top
    largest = max([*values, *([limit] if limit else [])], default=1.0) or 1.0
    return 1.06 * (min(largest, FAR * limit) if limit else largest)


def _limit(limit: Limits, x_axis: Axis, y_axis: Axis) -> list[Shape]:
    if limit.height is not None:
        y = y_axis(limit.height)
        # A line that breaks the limit does so early, and the other end is free.
        name = Words(x_axis.end - 6, y - 6, limit.name, "end", "limit")
        return [Stroke(((x_axis.start, y), (x_axis.end, y)), "limit"), name]
    if limit.place is None:
        return []
    x = x_axis(limit.place)
    anchor: Anchor = "end" if x > (x_axis.start + x_axis.end) / 2 else "start"
    name = Words(x + (-6 if anchor == "end" else 6), y_axis.end + 14, limit.name, anchor, "limit")
    return [Stroke(((x, y_axis.start), (x, y_axis.end)), "limit"), name]


def _line(line: Line, across: tuple[Axis, Scale], upward: tuple[Axis, Scale]) -> list[Shape]:
    (x_axis, x_scale), (y_axis, y_scale) = across, upward
    kept = [(x, y) for x, y in line.points if x <= x_axis.high and y <= y_axis.high]
    places = tuple((x_axis(x), y_axis(y)) for x, y in kept)
    shapes: list[Shape] = [Stroke(places, f"line {line.style}")] if len(places) > 1 else []
    every = max(len(places) // MOST_MARKS, 1)
    # From the end, which is what is looked for.
    for x, y in kept[::-1][::every]:
        told = f"{line.name}: {x:,.3g}{x_scale.unit}, {y:,.3g}{y_scale.unit}"
        shapes.append(Mark(x_axis(x), y_axis(y), 9, line.symbol, line.style, told))
    return shapes
