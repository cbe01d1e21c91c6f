"""Playbooks as sections: the list of them, or the page of one rule."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kprof.errors import KprofError
from kprof.report.section import Column, Section, Table, Text


def section_of_list(pages: Sequence[tuple[str, str]]) -> Section:
    """Render the names and titles of all pages."""
    columns = (Column("Playbook"), Column("What it is about", "prose"))
    return Section("Playbooks", 10, (Table(columns, tuple(pages), terminal_rows=len(pages)),))


def sections_of_page(page: Playbook) -> list[Section]:
    """Render the rule and the parts of one page; lines stay as they are written."""
    rule = f"Fires on: {page.fires_on}. Threshold: {page.threshold}."
    parts = [("Rule", rule), *page.parts]
    return [
        Section(heading, number, tuple(Text(line) for line in _lines(text)))
        for number, (heading, text) in enumerate(parts)
    ]


def _lines(text: str) -> list[str]:
    """Return a part's lines: paragraphs, points of lists, and lines of code, indented."""
    is_code, found = False, []
    for line in text.splitlines():
        if line.startswith("```"):
            is_code = not is_code
        elif line.strip():
            found.append(f"    {line}" if is_code else line)
    return found


# In an installed package they lie inside it, in a checkout beside it.
_PLACES = tuple(Path(__file__).parents[up] / "playbooks" for up in (1, 2))
HEADINGS = ("Symptom", "Why", "Confirm", "Fix", "Expected gain", "Limits", "Sources")


@dataclass(frozen=True)
class Playbook:
    """One page: its name is that of the rule, its title says it in words."""

    name: str
    title: str
    text: str
    """The page below its front matter, as Markdown."""
    fires_on: str
    """What the rule looks for, for the table of all rules."""
    threshold: str
    """From which share of the time on, and why."""
    change: str
    """The change that saves the time, in words for a summary."""

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """The page's parts: each heading, and the text below it."""
        pieces = re.split(r"^## (.+)$", self.text, flags=re.MULTILINE)[1:]
        return tuple(
            (head.strip(), body.strip())
            for head, body in zip(pieces[::2], pieces[1::2], strict=True)
        )


def all_playbooks() -> list[Playbook]:
    """Return every page, in the order of their names.

    Raises:
        KprofError: kprof was installed without them.
    """
    folder = next((place for place in _PLACES if place.is_dir()), None)
    if folder is None:
        raise KprofError("kprof was installed without its playbooks", fix="install it again")
    paths = sorted(path for path in folder.glob("*.md") if path.stem != "README")
    return [_read(path) for path in paths]


def find_playbook(name: str) -> Playbook:
    """Return the page of a rule.

    Raises:
        KprofError: no rule has that name.
    """
    pages = {page.name: page for page in all_playbooks()}
    wanted = name.replace("-", "_").removesuffix(".md")
    if wanted not in pages:
        near = ", ".join(difflib.get_close_matches(wanted, pages, 3, cutoff=0.0))
        raise KprofError(
            f"there is no playbook {name}", fix=f"the nearest: {near}; kprof playbook lists all"
        )
    return pages[wanted]


def _read(path: Path) -> Playbook:
    _, front, text = path.read_text(encoding="utf-8").split("---\n", 2)
    told = dict(line.split(": ", 1) for line in front.splitlines())
    title = next((line[2:].strip() for line in text.splitlines() if line.startswith("# ")), "")
    return Playbook(path.stem, title, text, told["fires_on"], told["threshold"], told["change"])
