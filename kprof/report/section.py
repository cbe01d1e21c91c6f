"""A section of the report as plain data, for the terminal or the HTML page.

A number is formatted by the section (it knows the unit); text is untrusted and is escaped by
its renderer.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from kprof.errors import modules_in

if TYPE_CHECKING:
    from kprof.trace import Trace

_BEYOND_ASCII = re.compile(r"[^\t\n\r -~]")
_BEYOND_A_LINE = re.compile(r"[^ -~]")


def displayable(text: str, *, in_one_line: bool = False) -> str:
    """Return text in which � stands for what could steer a reader, on a screen or in a document.

    That is every character without a shape: controls, turns of direction, invisible ones, half
    surrogate pairs, code points without a character, and Unicode's own ends of lines. Tabs and ends
    of lines are kept, except `in_one_line`.
    """
    suspect = _BEYOND_A_LINE if in_one_line else _BEYOND_ASCII
    return suspect.sub(lambda found: _with_a_shape(found[0]), text)


@cache
def _with_a_shape(character: str) -> str:
    kind = unicodedata.category(character)
    return "\N{REPLACEMENT CHARACTER}" if kind[0] == "C" or kind in ("Zl", "Zp") else character


@dataclass(frozen=True)
class Text:
    """A paragraph; `tone` is plain, good, warning, item (one of a list) or muted.

    A terminal leaves muted ones out.
    """

    text: str
    tone: str = "plain"


@dataclass(frozen=True)
class Facts:
    """Headline figures side by side: (label, value, explanation) each."""

    items: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Column:
    """A column: its header, how it is set, whether a narrow terminal keeps it.

    `align`: left; right (numbers); name (takes the room that is left, cut where it ends); prose.
    """

    header: str
    align: str = "left"
    essential: bool = True


@dataclass(frozen=True)
class Table:
    """Rows of formatted cells; `share` (0 to 1 a row, or empty) draws a bar in each row.

    With `has_signed_share` shares are from -1 to 1 and of changes: less time is drawn to the left.

    `terminal_rows`: how many the terminal shows; 0 leaves the table to the page. `has_total`: the
    last row adds up the others. `folded`: the page hides the table under these words, until asked.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    share: tuple[float, ...] = ()
    terminal_rows: int = 10
    has_total: bool = False
    folded: str = ""
    has_signed_share: bool = False


@dataclass(frozen=True)
class Figure:
    """A plotly figure as its plain JSON object, and the sentence that says what it shows.

    Names in it went through `figures.literal`: plotly reads its text as markup.
    """

    data: list[dict[str, object]]
    layout: dict[str, object]
    caption: str = ""
    height_px: int = 420


@dataclass(frozen=True)
class Segment:
    """A part of a bar: its name, its share as a number and in text, and a detail."""

    label: str
    share: float
    shown: str
    detail: str
    colour: str
    is_idle: bool = False


@dataclass(frozen=True)
class Bar:
    """One bar whose segments add up to the whole; it needs no script."""

    segments: tuple[Segment, ...]
    caption: str = ""


Part = Text | Facts | Table | Figure | Bar


@dataclass(frozen=True)
class Section:
    """One part of the report: `order` places it; `in_terminal`: the summary shows it too."""

    title: str
    order: int
    parts: tuple[Part, ...] = field(default_factory=tuple)
    in_terminal: bool = True


def is_in_terminal(part: Part) -> bool:
    """Tell whether a part of a section has something for a terminal."""
    if isinstance(part, Text):
        return part.tone != "muted"
    is_table = isinstance(part, Table) and bool(part.rows and part.terminal_rows)
    return is_table or isinstance(part, (Facts, Bar))


def sections_of(trace: Trace, *, for_page: bool = True) -> list[Section]:
    """Render the sections of an analyzed trace in their order; the terminal's are fewer."""
    sections = [
        module.render(trace)
        for module in modules_in("kprof.report.sections")
        if for_page or not getattr(module, "FOR_PAGE_ONLY", False)
    ]
    return sorted(sections, key=lambda section: section.order)
