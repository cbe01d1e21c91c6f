"""Measured ceilings on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from kprof.report.units import MISSING, format_amount, format_share, format_time


def print_ceilings(
    title: str, figures: Sequence[tuple[str, float, str, str, float | None]], console: Console
) -> None:
    """Print figures given as (name, value, unit, detail, spread)."""
    console.print(title, style="bold", markup=False)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("Ceiling")
    table.add_column("Value", justify="right")
    table.add_column("Spread", justify="right")
    table.add_column("")
    for name, value, unit, detail, spread in figures:
        shown = format_time(value) if unit == "ns" else format_amount(value, unit)
        table.add_row(name, shown, MISSING if spread is None else format_share(spread), detail)
    console.print(table)
