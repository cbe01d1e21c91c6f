"""Drawings of a partner report: plain shapes sized in pixels, line charts with limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kprof.report.partner.parts import Anchor, Box, Drawing, Mark, Shape, Stroke, Symbol, Words

WIDE, NARROW = 860, 340
FAR = 3
"""Times its limit: as far as an axis goes."""
CHARACTER = 7.8
"""Width of a character of a drawing's text, in pixels, a little more than it is."""


def both(draw: Callable[[int], Drawing]) -> tuple[Drawing, Drawing]:
    """Draw for a wide page and for a phone."""
    return draw(WIDE), draw(NARROW)


@dataclass(frozen=True)
class Part:
    """A part of a whole: its share of one, the class that fills it, its name."""

    name: str
    share: float
    style: str


def stack(bars: Sequence[tuple[str, Sequence[Part]]], width: int) -> Drawing:
    """Draw bars of 100 % each, one below the other, with a percent sign where there is room."""
    shapes: list[Shape] = []
    y = 0.0
    for label, parts in bars:
        if label:
            shapes.append(Words(0, y + 13, label, style="strong"))
            y += 20
        x = 0.0
        for part in parts:
            length = width * part.share
            tip = f"{part.name}: {100 * part.share:.1f} %"
            shapes.append(Box(x, y, max(length - 1.5, 0.4), 38, part.style, tip))
            text = f"{100 * part.share:.0f} %"
            if length > CHARACTER * len(text) + 10:
                shapes.append(
                    Words(x + length / 2 - 0.75, y + 24, text, "middle", f"on on-{part.style}")
                )
            x += length
        y += 38 + 16
    shapes += [Words(0, y - 2, "0 %", style="soft"), Words(width, y - 2, "100 %", "end", "soft")]
    return Drawing(width, y + 4, tuple(shapes))


@dataclass(frozen=True)
class Axis:
    """A straight axis: from `low` to `high` over pixels `start` to `end`, perhaps logarithmic."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Return where a value lies, kept inside the axis."""
        low, high, value = (
            (math.log(x) if self.is_log else x) for x in (self.low, self.high, value)
        )
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + min(max(share, 0.0), 1.0) * (self.end - self.start), 2)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round values from low to high, at most so many."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Range:
    """A row of a chart of ranges: a value, its bounds, and a limit that it is to keep."""

    name: str
    value: str
    middle: float | None
    low: float | None = None
    high: float | None = None
    style: str = "k0"
    symbol: Symbol = "circle"


def ranges(
    rows: Sequence[Range], width: int, unit: str, limit: float | None = None, limit_name: str = ""
) -> Drawing:
    """Draw a row for each range, on one axis from 0; the limit is a line across all."""
    known = [x for r in rows for x in (r.middle, r.low, r.high) if x is not None]
    known = [x for x in [*known, *([limit] if limit else [])] if math.isfinite(x)]
    # Values far beyond the limit are cut, so that values near it can be seen.
    most = FAR * limit if limit else math.inf
    top = 1.06 * min(max(known, default=1.0) or 1.0, most)
    bottom = min([0.0, *(x * 1.06 for x in known if x < 0)])
    axis = Axis(bottom, top, 6, width - 10)
    shapes: list[Shape] = []
    y = 22.0 if limit is not None else 4.0
    for row in rows:
        shapes.append(Words(0, y + 12, row.name, style="strong"))
        shapes.append(Words(width, y + 12, row.value, "end"))
        y += 30
        shapes.append(Stroke(((axis.start, y), (axis.end, y)), "grid"))
        shapes += _whisker(row, axis, y)
        y += 22
    places = ticks(bottom, top, 3 if width < 500 else 6)
    for value in places:
        shapes.append(Stroke(((axis(value), y), (axis(value), y + 5)), "axis"))
        anchor: Anchor = (
            "start" if axis(value) < 12 else "end" if axis(value) > width - 40 else "middle"
        )
        label = f"${value:,.6g}" if unit == "$" else f"{value:,.6g} {unit}"
        shapes.append(Words(axis(value), y + 20, label, anchor, "soft"))
    if limit is not None and math.isfinite(limit):
        x = axis(limit)
        name = Words(x, 11, limit_name, "end" if x > width / 2 else "start", "limit")
        shapes = [Stroke(((x, 16), (x, y + 5)), "limit"), name, *shapes]
    return Drawing(width, y + 26, tuple(shapes))


def _whisker(row: Range, axis: Axis, y: float) -> list[Shape]:
    shapes: list[Shape] = []
    ends = [x for x in (row.low, row.high) if x is not None and math.isfinite(x)]
    if row.middle is not None and math.isfinite(row.middle):
        ends.append(row.middle)
    if len(ends) > 1:
        left, right = axis(min(ends)), axis(max(ends))
        shapes.append(Box(left, y - 5, max(right - left, 1), 10, f"{row.style} band", row.name))
    if row.middle is not None and math.isfinite(row.middle):
        tip = f"{row.name}: {row.value}"
        shapes.append(Mark(axis(row.middle), y, 12, row.symbol, row.style, tip))
    return shapes


@dataclass(frozen=True)
class Dot:
    """A point of a chart over time, with what it says."""

    x: float
    y: float
    symbol: Symbol
    style: str
    tip: str
    size: float = 9.0


@dataclass(frozen=True)
class Band:
    """A range across the whole chart, with its middle, and what stands beside it."""

    low: float
    middle: float
    high: float


def pairs(
    dots: Sequence[Dot], width: int, band: Band | None, edges: Sequence[float], label: str
) -> Drawing:
    """Draw changes in percent, pair by pair; between `edges` they are too small to matter."""
    left, right, top, bottom = 62.0, width - 8.0, 26.0, 250.0
    values = [dot.y for dot in dots] + ([band.low, band.high] if band else []) + [0.0, *edges]
    low, high = min(values), max(values)
    spare = 0.08 * (high - low) or 1.0
    vertical = Axis(low - spare, high + spare, bottom, top)
    across = Axis(0.5, max(max((dot.x for dot in dots), default=1) + 0.5, 2.5), left, right)
    shapes: list[Shape] = [Words(0, 12, label, style="soft")]
    if band:
        y, y_low = vertical(band.high), vertical(band.low)
        shapes.append(Box(left, y, right - left, max(y_low - y, 1), "k0 band", "the interval"))
    for value in ticks(low - spare, high + spare):
        y = vertical(value)
        style = "axis" if value == 0 else "grid"
        shapes.append(Stroke(((left, y), (right, y)), style))
        shapes.append(Words(left - 6, y + 4, f"{value:+g} %" if value else "0 %", "end", "soft"))
    for edge in edges:
        shapes.append(Stroke(((left, vertical(edge)), (right, vertical(edge))), "edge"))
    if band:
        y = vertical(band.middle)
        shapes.append(Stroke(((left, y), (right, y)), "estimate"))
    shapes += [Mark(across(d.x), vertical(d.y), d.size, d.symbol, d.style, d.tip) for d in dots]
    last = max((dot.x for dot in dots), default=1)
    for value in ticks(1, last, 4 if width < 500 else 10):
        if value >= 1 and value == int(value):
            shapes.append(Words(across(value), bottom + 18, f"{value:g}", "middle", "soft"))
    shapes.append(Words(right, bottom + 36, "pair, in the order of time", "end", "soft"))
    return Drawing(width, bottom + 44, tuple(shapes))


@dataclass(frozen=True)
class Ceiling:
    """A ceiling of a roofline: a speed, and what it is; of memory bytes per second."""

    name: str
    rate: float


def roofline(
    dots: Sequence[Dot], width: int, memory: Ceiling | None, flats: Sequence[Ceiling], label: str
) -> Drawing:
    """Draw FLOP/s over FLOP per byte, both logarithmic, under the ceilings."""
    left, right, top, bottom = 64.0, width - 8.0, 26.0, 350.0
    ridge = max(f.rate for f in flats) / memory.rate if memory and flats else None
    xs = [dot.x for dot in dots] + ([ridge] if ridge else [])
    ys = [dot.y for dot in dots] + [flat.rate for flat in flats]
    across = Axis(min(xs) / 2, max(xs) * 6, left, right, is_log=True)
    upward = Axis(min(ys) / 2, max(ys) * 2.5, bottom, top, is_log=True)
    shapes: list[Shape] = [Words(0, 12, label, style="soft")]
    for value in _tens(upward):
        shapes.append(Stroke(((left, upward(value)), (right, upward(value))), "grid"))
        shapes.append(Words(left - 6, upward(value) + 4, short_rate(value), "end", "soft"))
    for value in _tens(across, 5 if width < 500 else 9):
        shapes.append(Stroke(((across(value), top), (across(value), bottom)), "grid"))
        shapes.append(Words(across(value), bottom + 18, f"{value:,g}", "middle", "soft"))
    shapes += _ceilings(across, upward, memory, flats)
    shapes += [Mark(across(d.x), upward(d.y), d.size, d.symbol, d.style, d.tip) for d in dots]
    axis = "operations per byte moved (FLOP/B)"
    shapes.append(Words(right, bottom + 36, axis, "end", "soft"))
    return Drawing(width, bottom + 44, tuple(shapes))


def _ceilings(
    across: Axis, upward: Axis, memory: Ceiling | None, flats: Sequence[Ceiling]
) -> list[Shape]:
    shapes: list[Shape] = []
    for flat in flats:
        begin = max(across.low, flat.rate / memory.rate) if memory else across.low
        y = upward(flat.rate)
        shapes.append(Stroke(((across(begin), y), (across.end, y)), "ceiling"))
        shapes.append(Words(across.end, y - 5, flat.name, "end", "soft"))
    if memory and flats:
        top = max(flat.rate for flat in flats)
        begin = max(across.low, upward.low / memory.rate)
        ends = ((begin, begin * memory.rate), (top / memory.rate, top))
        shapes.append(Stroke(tuple((across(x), upward(y)) for x, y in ends), "ceiling"))
        # Beside the slope, where no ceiling has its name.
        middle = math.sqrt(begin * top / memory.rate)
        place = across(middle), upward(middle * memory.rate)
        shapes.append(Words(place[0] - 8, place[1] - 8, memory.name, "end", "soft"))
    return shapes


def _tens(axis: Axis, most: int = 9) -> list[float]:
    powers = range(math.ceil(math.log10(axis.low)), math.floor(math.log10(axis.high)) + 1)
    every = -(-len(powers) // most) or 1
    return [10.0**power for power in powers if power % every == 0]


def short_rate(value: float) -> str:
    """Return a power of ten of operations a second, as short as on an axis."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:g} {prefix}"
    return f"{value:g}"


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
    """The quantity on an axis, and its unit."""

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
