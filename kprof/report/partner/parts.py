"""What a partner report is built of, as plain data: drawings with their tables, cards, chapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kprof.report.section import Facts, Table, Text

Anchor = Literal["start", "middle", "end"]
Symbol = Literal["circle", "square", "triangle", "diamond", "cross"]


@dataclass(frozen=True)
class Box:
    """A rectangle; `style` names a class of the page's style sheet; `tip` says what it is."""

    x: float
    y: float
    width: float
    height: float
    style: str
    tip: str = ""


@dataclass(frozen=True)
class Stroke:
    """A line through points."""

    points: tuple[tuple[float, float], ...]
    style: str


@dataclass(frozen=True)
class Mark:
    """A symbol of so many pixels around its centre."""

    x: float
    y: float
    size: float
    symbol: Symbol
    style: str
    tip: str = ""


@dataclass(frozen=True)
class Words:
    """Text at a place, untrusted like all text."""

    x: float
    y: float
    text: str
    anchor: Anchor = "start"
    style: str = ""


Shape = Box | Stroke | Mark | Words


@dataclass(frozen=True)
class Drawing:
    """Shapes on a surface of so many pixels."""

    width: float
    height: float
    shapes: tuple[Shape, ...]


@dataclass(frozen=True)
class Picture:
    """One drawing for wide pages and one for phones, what they show, and the numbers behind."""

    title: str
    wide: Drawing
    narrow: Drawing
    caption: str
    table: Table
    """The same numbers: for those who cannot see a drawing, and for those who want to be sure."""
    is_table_open: bool = False
    legend: tuple[tuple[str, str], ...] = ()
    """(style, what it stands for) each."""


@dataclass(frozen=True)
class Verdict:
    """The one sentence, with the word that sums it up; `tone` as of a Text."""

    word: str
    sentence: str
    tone: str


@dataclass(frozen=True)
class Card:
    """A finding: what, what to do, what it brings, how sure, how much work; the rest on demand."""

    title: str
    grade: str
    facts: tuple[tuple[str, str], ...]
    body: tuple[Text, ...] = ()
    details: tuple[Text | Table, ...] = ()
    sort_by: float = 0.0
    """The middle of its saving, as a share: what the page sorts by."""


@dataclass(frozen=True)
class Steps:
    """An ordered list of sentences."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Folded:
    """A table that is shown on demand."""

    title: str
    table: Table


Block = Text | Facts | Table | Picture | Verdict | Card | Steps | Folded


@dataclass(frozen=True)
class Chapter:
    """What one section of a partner report shows."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Missing:
    """A section for which there is no data, and what would give it."""

    what: str
    how: str
