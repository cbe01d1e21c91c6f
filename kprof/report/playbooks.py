"""Playbooks as sections: the list of them, or one page."""

from __future__ import annotations

from collections.abc import Sequence

from kprof.report.section import Column, Section, Table, Text


def section_of_list(pages: Sequence[tuple[str, str]]) -> Section:
    """Render the names and titles of all pages."""
    columns = (Column("Playbook"), Column("What it is about", "prose"))
    return Section("Playbooks", 10, (Table(columns, tuple(pages), terminal_rows=len(pages)),))


def sections_of_page(parts: Sequence[tuple[str, str]]) -> list[Section]:
    """Render the parts of one page, each under its heading; lines stay as they are written."""
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
