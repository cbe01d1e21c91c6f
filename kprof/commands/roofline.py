"""`kprof roofline`: measure this GPU's ceilings for later runs on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kprof.commands import Answer

if TYPE_CHECKING:
    from rich.console import Console

    from kprof.collect.ceilings import Ceilings


@dataclass(frozen=True)
class Measured:
    """The measured ceilings, and their file; no file for a user without a home."""

    ceilings: Ceilings
    path: Path | None

    def json(self) -> bytes:
        """Return the ceilings as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self.ceilings))


def roofline(
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> Answer | None:
    """Measure this GPU's roofline once, for later runs on it.

    Takes less than a minute and 13 GiB of the GPU's memory. The roofline of every later
    `kprof run` on this GPU and driver is drawn from it.
    """
    measured = measure_roofline()
    if json:
        return Answer("", [], measured.json())
    from rich.console import Console

    ceilings = measured.ceilings
    figures = [(f.name, f.value, f.unit, f.detail, f.spread) for f in ceilings.figures]
    title = f"{ceilings.gpu}, driver {ceilings.driver}, measured in {ceilings.took_s:.0f} s"
    print_ceilings(title, figures, Console())
    typer.echo(f"kept for later runs: {measured.path or 'nowhere, there is no home folder'}")
    return None


def measure_roofline() -> Measured:
    """Measure the GPU and keep the figures."""
    from kprof.collect.ceilings import keep_gpu_ceilings
    from kprof.collect.gpu_ceilings import measure_gpu

    ceilings = measure_gpu()
    return Measured(ceilings, keep_gpu_ceilings(ceilings))


def print_ceilings(
    title: str, figures: Sequence[tuple[str, float, str, str, float | None]], console: Console
) -> None:
    """Print figures given as (name, value, unit, detail, spread)."""
    from rich.table import Table

    from kprof.report.units import MISSING, format_amount, format_share, format_time

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
