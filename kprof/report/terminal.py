"""The terminal summary: the sections that fit a screen, drawn with rich."""

from __future__ import annotations

import re
from itertools import count

from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table as Grid
from rich.text import Text as Line

from kprof.report.kernel_names import readable
from kprof.report.section import (
    Bar,
    Column,
    Facts,
    Section,
    Segment,
    Table,
    Text,
    displayable,
    is_in_terminal,
)
from kprof.report.units import UNKNOWN, shorten

INDENT = "  "
NAME_WIDTH = 28
"""A column of names is not made narrower than this to keep a column that is not essential."""
PROSE_WIDTH = 20
"""Nor one of essential prose than this, or than its longest word; prose is broken, never cut."""
NAME_MAX_WIDTH = 80
SHORT_VALUE = 14
BAR_WIDTH = 16
BAR_MIN_CONSOLE = 100

UNIT_OF_A_NUMBER = re.compile(r"(?<=\d) (?=%|[nuµm]?s\b)")
JOINED = "\ufdd0"
"""Stands between a number and its unit while lines are broken; no text holds it."""

_STYLES = {"plain": "", "good": "green", "warning": "yellow", "muted": "dim"}
_ASCII = str.maketrans(
    {"µ": "u", "…": "~", "—": "-", "·": "-", "≤": "<", "→": ">"} | {"▓": "=", "▒": "+", "░": "."}
)


def print_summary(title: str, sections: list[Section], console: Console) -> None:
    """Print the sections meant for a terminal, as wide as `console` is."""
    console.print(Rule(_line(f"kprof · {title}", console), align="left"))
    for section in sections:
        if section.in_terminal:
            console.print(_line(section.title, console, "bold"))
            shown = [part for part in section.parts if is_in_terminal(part)]
            for number, part in enumerate(shown):
                if number and (isinstance(part, Table) or isinstance(shown[number - 1], Table)):
                    console.print()
                _print_part(part, console)
            console.print()


def _print_part(part: object, console: Console) -> None:
    if isinstance(part, Text):
        line = _line(part.text, console, _STYLES.get(part.tone, ""))
        for row in _broken(line, console, console.width - len(INDENT)):
            console.print(Line(INDENT) + row)
    elif isinstance(part, Facts):
        console.print(Padding(_facts_grid(part, console), (0, 0, 0, 2), expand=False))
    elif isinstance(part, Bar):
        _print_bar(part, console)
    elif isinstance(part, Table):
        _print_table(part, console)


# Neighbours differ also without colour; idle time, which comes last, has the lightest.
FILLS, IDLE_FILLS = "█▓▒", "░·:"
BAR_MAX_WIDTH = 100


def _print_bar(bar: Bar, console: Console) -> None:
    """Print one bar over the width, and below it the segments by name, in columns."""
    width = min(console.width - len(INDENT), BAR_MAX_WIDTH)
    ends = [
        round(width * sum(one.share for one in bar.segments[: i + 1]))
        for i in range(len(bar.segments))
    ]
    drawn, legend = Line(INDENT), []
    numbers = {False: count(), True: count()}
    for segment, end in zip(bar.segments, ends, strict=True):
        fills = IDLE_FILLS if segment.is_idle else FILLS
        fill = _printable(fills[next(numbers[segment.is_idle]) % len(fills)], console)
        drawn.append(fill * (end - (len(drawn) - len(INDENT))), style=segment.colour)
        legend.append((Line(fill, style=segment.colour), segment))
    console.print(drawn, no_wrap=True, crop=True)
    _print_legend(legend, width, console)


def _print_legend(legend: list[tuple[Line, Segment]], width: int, console: Console) -> None:
    cells = [
        mark + _line(f" {one.label} {one.shown}, {one.detail}", console) for mark, one in legend
    ]
    longest = max(cell.cell_len for cell in cells) + 2
    columns = max(width // longest, 1)
    for start in range(0, len(cells), columns):
        row = Line(INDENT)
        for cell in cells[start : start + columns]:
            cell.pad_right(longest - cell.cell_len)
            row.append_text(cell)
        row.rstrip()
        console.print(row)


def _broken(line: Line, console: Console, width: int) -> list[Line]:
    """Break a line where words end, but not between a number and its unit."""
    line.plain = UNIT_OF_A_NUMBER.sub(JOINED, _with_breaks(line.plain, width))
    rows = list(line.wrap(console, width))
    for row in rows:
        row.plain = row.plain.replace(JOINED, " ")
        row.rstrip()
    return rows


def _with_breaks(text: str, width: int) -> str:
    """Let words that no line can hold break after a dot or a slash, else after an underscore.

    The space that is put there stands at the end of its line, where it is cut off.
    """
    return " ".join(" ".join(_pieces(word, width)) for word in text.split(" "))


def _pieces(word: str, width: int) -> list[str]:
    if len(word) <= width:
        return [word]
    ends = [word.rfind(one, 0, width) + 1 for one in "./_"]
    end = next((one for one in ends if one), width)
    return [word[:end], *_pieces(word[end:], width)]


def _facts_grid(facts: Facts, console: Console) -> Grid:
    grid = Grid.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    room = console.width - len(INDENT) - 2 - max(len(label) for label, _, _ in facts.items)
    # Short values stand in a column of their own; a long one is followed by its explanation.
    short = [len(value) for _, value, _ in facts.items if len(value) <= SHORT_VALUE]
    width = max(short, default=0)
    for label, value, explanation in facts.items:
        what = _line(value, console, "yellow" if value == UNKNOWN else "bold")
        what.pad_right(max(width - len(value), 0))
        what.append("  ").append_text(_line(explanation, console, "dim"))
        rows = _broken(what, console, max(room, 1))
        grid.add_row(_line(label, console), Line("\n").join(rows))
    return grid


def _print_table(table: Table, console: Console) -> None:
    has_bars = bool(table.share) and console.width >= BAR_MIN_CONSOLE
    room = console.width - 2 - (BAR_WIDTH + 2 if has_bars else 0)
    is_name = [column.align == "name" for column in table.columns]
    rows = [
        tuple(
            _printable(readable(cell) if named else cell, console)
            for cell, named in zip(row, is_name, strict=True)
        )
        for row in table.rows[: table.terminal_rows]
    ]
    widths = _column_widths(table.columns, rows, room)
    grid = Grid(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for i, width in widths.items():
        header = _line(table.columns[i].header, console)
        is_number = table.columns[i].align == "right"
        grid.add_column(header, justify="right" if is_number else "left", width=width)
    if has_bars:
        grid.add_column("", width=BAR_WIDTH)
    for number, row in enumerate(rows):
        cells = [
            _cell(row[i], width, console, is_cut=table.columns[i].align != "prose")
            for i, width in widths.items()
        ]
        bar = [_bar(table, number, console)] if has_bars else []
        grid.add_row(*cells, *bar)
    console.print(Padding(grid, (0, 0, 0, 2), expand=False))
    left_out = len(table.rows) - len(rows)
    if left_out > 0:
        console.print(_line(f"  {left_out:,} more in the report", console, "dim"))


def _cell(text: str, width: int, console: Console, *, is_cut: bool) -> Line:
    if is_cut:
        return _line(shorten(text, width), console)
    return Line("\n").join(_broken(_line(text, console), console, width))


def _column_widths(
    columns: tuple[Column, ...], rows: list[tuple[str, ...]], room: int
) -> dict[int, int]:
    """Return the columns that fit and their widths: names and prose give way first, so far.

    Where the essential ones do not fit even so, the longest give way further; what room is left
    goes to the narrowest that want more.
    """
    wanted = [
        min(max(len(column.header), *(len(row[i]) for row in rows)), NAME_MAX_WIDTH)
        for i, column in enumerate(columns)
    ]
    least = [
        min(wanted[i], _least_width(column, [row[i] for row in rows]))
        for i, column in enumerate(columns)
    ]
    kept = [i for i, column in enumerate(columns) if column.essential]
    for i, column in enumerate(columns):
        if not column.essential and sum(least[j] + 2 for j in [*kept, i]) <= room:
            kept.append(i)
    names = [i for i in kept if columns[i].align != "right"]
    while names and sum(least[i] + 2 for i in kept) > room and max(least[i] for i in names) > 8:
        least[max(names, key=lambda i: least[i])] -= 1
    widths = {i: least[i] for i in sorted(kept)}
    for _ in range(room - sum(width + 2 for width in widths.values())):
        wider = [i for i in widths if widths[i] < wanted[i]]
        if not wider:
            break
        widths[min(wider, key=lambda i: widths[i])] += 1
    return widths


def _least_width(column: Column, cells: list[str]) -> int:
    """Return the width from which a column gives way no further without need."""
    if column.align == "prose":
        least = PROSE_WIDTH if column.essential else NAME_WIDTH
        return max(least, *(len(word) for cell in cells for word in cell.split() or [""]))
    return NAME_MAX_WIDTH if column.align == "right" else NAME_WIDTH


def _bar(table: Table, number: int, console: Console) -> Line:
    share, longest = table.share[number], max(map(abs, table.share)) or 1.0
    length = round(BAR_WIDTH * abs(share) / longest)
    style = "cyan"
    if table.has_signed_share:
        style = "green" if share < 0 else "yellow"
    return Line(_printable("█", console) * length, style=style, no_wrap=True)


def _line(text: str, console: Console, style: str = "") -> Line:
    return Line(_printable(text, console), style=style)


def _printable(text: str, console: Console) -> str:
    """Return text that cannot steer a terminal and that its encoding can show."""
    safe = displayable(text, in_one_line=True)
    if console.encoding.lower().replace("-", "") == "utf8":
        return safe
    replaced = safe.replace("█", "#").translate(_ASCII)
    return replaced.encode(console.encoding, errors="replace").decode(console.encoding)
