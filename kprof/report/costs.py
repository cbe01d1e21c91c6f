"""Costs as sections."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from kprof.analyze.cost.price import Band, Price, Quote
from kprof.analyze.cost.sheet import Costs, Figure
from kprof.report.section import Column, Part, Section, Table, Text

TITLE, MISSING_FACTS = "Cost", "Missing"
ORDER = 95
BAND = (
    "Low, mid and high follow the band of the price; where a gain is uncertain, that of the gain."
)


def sections_of_costs(costs: Costs) -> list[Section]:
    """Render the figures by topic, with the price and its date under every dollar."""
    parts: list[Part] = [Text(warning, "warning") for warning in costs.warnings]
    if costs.price:
        parts += [Text(_basis(costs.price)), Text("; ".join(costs.price.sources), "muted")]
    sections = [Section(f"{TITLE}, {costs.as_of}", ORDER, tuple(parts))]
    for topic, figures in groupby(costs.figures, key=lambda figure: figure.topic):
        sections.append(Section(topic, ORDER, (_table(list(figures)),)))
    if costs.missing:
        lines = [Text(f"{m.topic}: give {', '.join(m.give)}.") for m in costs.missing]
        sections.append(Section(MISSING_FACTS, ORDER, tuple(lines)))
    if costs.notes:
        sections.append(Section("Notes", ORDER, tuple(Text(note) for note in costs.notes)))
    return sections


def _basis(price: Price) -> str:
    band = price.usd_per_gpu_hour
    values = " / ".join(f"${_number(value)}" for value in _distinct(band))
    kind = " (low / mid / high)" if not band.is_known else ""
    return f"{values} a GPU-hour{kind}: {price.name}, {_dates(price)}."


def _distinct(band: Band) -> list[float]:
    return [band.mid] if band.is_known else [band.low, band.mid, band.high]


def _dates(price: Price) -> str:
    if price.oldest == price.newest:
        return f"of {price.oldest}"
    return f"of {price.oldest} to {price.newest}"


def _table(figures: list[Figure]) -> Table:
    columns = (
        Column("What", "name"),
        Column("Low", "right"),
        Column("Mid", "right"),
        Column("High", "right"),
        Column("Unit"),
        Column("Oldest price", essential=False),
        Column("How", "prose", essential=False),
    )
    rows = []
    for figure in figures:
        band = figure.values
        ends = ["", ""] if band.is_known else [_number(band.low), _number(band.high)]
        price = min((p.oldest for p in figure.prices), default=None)
        of = price.isoformat() if price else ""
        what = (figure.name, ends[0], _number(band.mid), ends[1], figure.unit, of, figure.formula)
        rows.append(what)
    # A column in which nothing stands would only take room.
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    shown = tuple(tuple(row[i] for i in kept) for row in rows)
    return Table(tuple(columns[i] for i in kept), shown, BAND, terminal_rows=len(rows))


def _number(value: float) -> str:
    """Format a number with four digits, or all of its whole ones; large ones as B and T."""
    for factor, suffix in ((1e12, " T"), (1e9, " B")):
        if abs(value) >= factor:
            return f"{value / factor:.4g}{suffix}"
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"


def section_of_quotes(quotes: Sequence[Quote]) -> Section:
    """Render a table of prices, each with its list, term, region, date and source."""
    columns = (
        Column("GPU"),
        Column("$/GPU-h", "right"),
        Column("Term"),
        Column("List", "name"),
        Column("Date"),
        Column("Region", essential=False),
        Column("Source", "name", essential=False),
        Column("Note", "name", essential=False),
    )
    rows = tuple(
        (
            quote.gpu,
            f"{quote.usd_per_gpu_hour:.2f}",
            quote.term,
            quote.price_list,
            quote.date.isoformat(),
            quote.region or "",
            quote.source,
            quote.note or "",
        )
        for quote in sorted(quotes, key=lambda q: (q.gpu, q.term, q.usd_per_gpu_hour))
    )
    return Section("Prices", ORDER, (Table(columns, rows, terminal_rows=len(rows)),))
