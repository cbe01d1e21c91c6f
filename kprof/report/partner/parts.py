"""Parts of a partner report as plain data, with the templates that choose its sections."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from kprof.errors import KprofError, modules_in
from kprof.report.section import Facts, Table, Text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from kprof.report.partner.evidence import Evidence

FOLDER = Path(__file__).parent / "templates"
SECTIONS = "kprof.report.partner.sections"

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
    """The one sentence, with the word that sums it up.

    `tone` as of a Text, or open: proven in part.
    """

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
    """One section of a partner report: its title and blocks."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Missing:
    """A section for which there is no data, and what would give it."""

    what: str
    how: str


Render = Callable[["Evidence"], Chapter | Missing | None]


@dataclass(frozen=True)
class Template:
    """The sections by their names, in order; `titles` renames some of them."""

    sections: tuple[str, ...]
    titles: dict[str, str] = field(default_factory=dict)


def all_sections() -> dict[str, Render]:
    """Return what renders each section, by the section's name.

    A module is one section of its own name, or holds several in `SECTIONS`.
    """
    found: dict[str, Render] = {}
    for module in modules_in(SECTIONS):
        name = module.__name__.rpartition(".")[2]
        found |= module.SECTIONS if hasattr(module, "SECTIONS") else {name: module.render}
    return dict(sorted(found.items()))


def list_templates() -> list[str]:
    """Return the names of the templates that kprof brings."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read_template(name: str) -> Template:
    """Read a template of kprof's by its name, or one's own by its file.

    Raises:
        KprofError: there is none of that name, it is not a template, or names an unknown section.
    """
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        template = msgspec.convert(content, Template)
        if unknown := sorted(content.keys() - {"sections", "titles"}):
            raise ValueError(f"it sets {unknown[0]}, which means nothing")
    except OSError as error:
        fix = f"take {' or '.join(list_templates())}, or name a file that ends in .toml"
        raise KprofError(f"there is no template {name}", fix=fix) from error
    except (ValueError, msgspec.ValidationError) as error:
        fix = "it needs a line such as sections = ['cover', 'summary']; see docs/partner_report.md"
        raise KprofError(f"{name} is not a template: {error}", fix=fix) from error
    known = all_sections()
    named = [*template.sections, *template.titles]
    if unknown := [one for one in named if one not in known]:
        problem = f"{name}: there is no section {unknown[0]!r}"
        raise KprofError(problem, fix=f"sections: {', '.join(known)}")
    if len(set(template.sections)) < len(template.sections) or not template.sections:
        raise KprofError(f"{name} names a section twice, or none", fix="name each once")
    return template
