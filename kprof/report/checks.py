"""The doctor's findings on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

STYLES = {"ok": "green", "limited": "yellow", "missing": "red"}


def print_checks(checks: Sequence[tuple[str, str, str, str]], console: Console) -> None:
    """Print checks as (name, state, what was found, how to mend it)."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, state, found, mend in checks:
        text = Text(found)
        if mend:
            text.append(f"\n→ {mend}", style="dim")
        table.add_row(Text(name), Text(state, style=STYLES[state]), text)
    console.print(table)
