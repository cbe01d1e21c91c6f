"""Every pair of a comparison: drawn in the order of time, with the GPU's clock, and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import isfinite

from kprof.comparison import Comparison, Pair
from kprof.report.changes import format_percent, format_value
from kprof.report.figures import literal
from kprof.report.section import Column, Figure, Part, Section, Table, Text
from kprof.report.units import MISSING, format_count, format_time

OF_A, OF_B, BAND, LEFT_OUT = "#4c78a8", "#f58518", "#8c8c94", "#d8443c"
SYMBOLS = {"A": "circle", "B": "diamond"}
MARGIN = {"l": 70, "r": 20, "t": 10, "b": 46}
WIDE = 3.0
"""From this ratio of the largest to the least on, a logarithmic axis has decades to mark."""
LEGEND = {"orientation": "h", "y": 1.12, "x": 0}


def section_of_pairs(comparison: Comparison) -> Section:
    """Render every pair of the first metric, what they were taken under, and the table of all."""
    parts: list[Part] = [
        _ratios(comparison),
        _samples(comparison),
        Text(conditions_of(comparison.pairs)),
    ]
    if clocks := _clocks(comparison):
        parts.append(clocks)
    return Section("Every pair", 40, (*parts, _table(comparison)), in_terminal=False)


def conditions_of(pairs: tuple[Pair, ...]) -> str:
    """Say what was read of the GPU around the samples, and which pairs that left out."""
    causes = Counter(pair.problem for pair in pairs if pair.problem)
    clocks = [clock for pair in pairs for clock in pair.clocks_mhz if clock is not None]
    said = [f"The GPU's clock: {min(clocks):,.0f} to {max(clocks):,.0f} MHz."] if clocks else []
    if not clocks:
        said.append("No sensor reported a GPU clock, so throttling was not checked.")
    elif not causes:
        said.append("No pair was left out: heat, a power brake or a neighbour was seen in none.")
    said += [f"{format_count(n, 'pair')} left out: {cause}." for cause, n in causes.most_common()]
    return " ".join(said)


def _numbered(comparison: Comparison) -> Iterator[tuple[int, Pair]]:
    """Yield the pairs that can be drawn, in the order of time, each with its number."""
    for number, pair in enumerate(comparison.pairs, 1):
        if all(isfinite(value) and value > 0 for value in (pair.a[0], pair.b[0])):
            yield number, pair


def _ratios(comparison: Comparison) -> Figure:
    data: list[dict[str, object]] = []
    for is_good, name, colour in ((True, "pair", OF_A), (False, "left out", LEFT_OUT)):
        chosen = [(i, p) for i, p in _numbered(comparison) if bool(p.problem) != is_good]
        if not chosen:
            continue
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": [i for i, _ in chosen],
                "y": [round(pair.b[0] / pair.a[0], 6) for _, pair in chosen],
                "text": [literal(_told(comparison, pair)) for _, pair in chosen],
                "hovertemplate": "pair %{x}: %{y:.4f}<br>%{text}<extra></extra>",
                "marker": {"color": colour, "symbol": "circle" if is_good else "x"},
            }
        )
    what = comparison.headline.metric.name
    caption = (
        f"Each dot is a pair, in the order of time: B's {what} over A's, on a logarithmic scale. "
        "Solid: the estimate, in its interval; dotted: the least effect that matters."
    )
    layout: dict[str, object] = {
        "margin": MARGIN,
        "showlegend": len(data) > 1,
        "legend": LEGEND,
        "xaxis": {"title": {"text": "pair"}, "zeroline": False},
        "yaxis": {
            "title": {"text": literal(f"B's {what} over A's")},
            "type": "log",
            **_ticks([pair.b[0] / pair.a[0] for _, pair in _numbered(comparison)]),
        },
        "shapes": _marks(comparison),
    }
    return Figure(data, layout, caption, height_px=360)


def _ticks(ratios: list[float]) -> dict[str, object]:
    """Mark a wide range by 1, 2, 5, 10 and so on: plotly would write the digits between alone."""
    if not ratios or max(ratios) < WIDE * min(ratios):
        return {"nticks": 8}
    values = [digit * 10.0**power for power in range(-6, 7) for digit in (1, 2, 5)]
    return {"tickvals": values, "ticktext": [f"{value:,.6g}" for value in values]}


def _told(comparison: Comparison, pair: Pair) -> str:
    """Say what one pair was: its values, which came first, and why it does not count."""
    metric = comparison.headline.metric
    values = f"A {format_value(pair.a[0], metric)}, B {format_value(pair.b[0], metric)}"
    since_ns = pair.start_ns - comparison.pairs[0].start_ns
    when = f"{'A' if pair.is_a_first else 'B'} first, {format_time(since_ns)} after the first pair"
    return f"{values}; {when}" + (f"; left out: {pair.problem}" if pair.problem else "")


def _samples(comparison: Comparison) -> Figure:
    """Draw A's and B's own values, where what disturbs both shows as what they share."""
    metric = comparison.headline.metric
    scale, unit = (1e6, "ms") if metric.unit == "ns" else (1.0, metric.unit)
    numbered = list(_numbered(comparison))
    arms = (
        ("A", OF_A, [pair.a[0] / scale for _, pair in numbered]),
        ("B", OF_B, [pair.b[0] / scale for _, pair in numbered]),
    )
    caption = (
        "The samples themselves. What both go through together, such as heat or a neighbour, is "
        "in both of a pair, and so not in their ratio."
    )
    label = literal(f"{metric.name}, {unit}")
    return _of_both(arms, [i for i, _ in numbered], label, caption)


def _clocks(comparison: Comparison) -> Figure | None:
    known = [(i, p) for i, p in _numbered(comparison) if None not in p.clocks_mhz]
    if not known:
        return None
    arms = (
        ("A", OF_A, [float(pair.clocks_mhz[0] or 0) for _, pair in known]),
        ("B", OF_B, [float(pair.clocks_mhz[1] or 0) for _, pair in known]),
    )
    caption = "The clock of the GPU's multiprocessors during each sample, as NVML reads it."
    return _of_both(arms, [i for i, _ in known], "SM clock, MHz", caption)


def _of_both(
    arms: tuple[tuple[str, str, list[float]], ...], numbers: list[int], label: str, caption: str
) -> Figure:
    data: list[dict[str, object]] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": numbers,
            "y": [float(f"{value:.6g}") for value in values],
            "marker": {"color": colour, "symbol": SYMBOLS[name]},
            "line": {"color": colour, "width": 1},
        }
        for name, colour, values in arms
    ]
    layout: dict[str, object] = {
        "margin": MARGIN,
        "legend": LEGEND,
        "xaxis": {"title": {"text": "pair"}, "zeroline": False},
        "yaxis": {"title": {"text": label}, "zeroline": False},
    }
    return Figure(data, layout, caption, height_px=260)


def _marks(comparison: Comparison) -> list[dict[str, object]]:
    across: dict[str, object] = {"xref": "paper", "x0": 0, "x1": 1}
    effect = comparison.plan.smallest_effect
    marks: list[dict[str, object]] = [
        {"type": "line", **across, "y0": y, "y1": y, "line": {"color": BAND, "dash": "dot"}}
        for y in (1 / (1 + effect), 1 + effect)
    ]
    if interval := comparison.headline.interval:
        band = {"type": "rect", "y0": interval.low, "y1": interval.high, "fillcolor": OF_A}
        marks.append({**band, **across, "opacity": 0.18, "line": {"width": 0}, "layer": "below"})
        line = {"type": "line", "y0": interval.ratio, "y1": interval.ratio}
        marks.append({**line, **across, "line": {"color": OF_A, "width": 1.5}})
    return marks


def _table(comparison: Comparison) -> Table:
    others = range(1, len(comparison.plan.metrics))
    columns = (
        Column("Pair", "right"),
        Column("First"),
        Column("A", "right"),
        Column("B", "right"),
        Column("Change", "right"),
        *(Column(f"{comparison.plan.metrics[i].name}, change", "right") for i in others),
        Column("Clock of A, MHz", "right"),
        Column("Clock of B, MHz", "right"),
        Column("Left out", "prose"),
    )
    rows = [_row(i, pair, comparison) for i, pair in enumerate(comparison.pairs, 1)]
    # A column in which nothing is known of any pair would only push the others off the page.
    kept = [i for i in range(len(columns)) if any(row[i] not in ("", MISSING) for row in rows)]
    shown = tuple(tuple(row[i] for i in kept) for row in rows)
    return Table(tuple(columns[i] for i in kept), shown, terminal_rows=0)


def _row(number: int, pair: Pair, comparison: Comparison) -> tuple[str, ...]:
    metric = comparison.headline.metric
    clocks = [MISSING if clock is None else f"{clock:,.0f}" for clock in pair.clocks_mhz]
    changes = [_change(a, b) for a, b in zip(pair.a, pair.b, strict=True)]
    return (
        str(number),
        "A" if pair.is_a_first else "B",
        format_value(pair.a[0], metric),
        format_value(pair.b[0], metric),
        *changes,
        *clocks,
        pair.problem,
    )


def _change(a: float, b: float) -> str:
    return format_percent(b / a) if a > 0 and isfinite(b / a) else MISSING
