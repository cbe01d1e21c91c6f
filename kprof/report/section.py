"""A section of the report as plain data, for the terminal or the HTML page.

A number is formatted by the section (it knows the unit); text is untrusted and is escaped by
its renderer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kprof.errors import modules_in

if TYPE_CHECKING:
    from kprof.trace import Trace

# Control characters, half surrogate pairs, ends of lines and turns of direction.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def displayable(text: str) -> str:
    """Return text without characters that HTML forbids, or that turn the text around them."""
    return _UNSAFE.sub("\N{REPLACEMENT CHARACTER}", text)


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
    caption: str


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
