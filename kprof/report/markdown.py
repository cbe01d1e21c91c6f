"""Sections as Markdown, for a pull request: no figures, no name that could be markup."""

from __future__ import annotations

import re

from kprof.report.redaction import redacted
from kprof.report.section import Bar, Column, Facts, Part, Section, Table, Text

MOST_ROWS = 25
TONES = {"warning": "⚠ "}
ALIGNED = {"right": "--:"}
# A name may hold what Markdown, or the HTML in it, would act on.
SPECIAL = re.compile(r"([\\`*_\[\]<>|~#@&$])")


def render_markdown(title: str, sections: list[Section]) -> str:
    """Return a document of those of the sections that a summary shows."""
    title, sections = redacted((title, sections))
    blocks = [f"# {_plain(title)}"]
    for section in sections:
        if section.in_terminal:
            blocks.append(f"## {_plain(section.title)}")
            blocks += [block for part in section.parts if (block := _block(part))]
    return "\n\n".join(blocks) + "\n"


def _block(part: Part) -> str:
    if isinstance(part, Text):
        return TONES.get(part.tone, "") + _plain(part.text)
    if isinstance(part, Facts):
        columns = (Column("What"), Column("Value"), Column("Explanation"))
        return _grid(columns, part.items)
    if isinstance(part, Bar):
        return "\n".join(
            f"- {_plain(f'{one.label}: {one.shown}, {one.detail}')}" for one in part.segments
        )
    if isinstance(part, Table) and part.rows:
        left_out = len(part.rows) - MOST_ROWS
        are = "more row is" if left_out == 1 else "more rows are"
        more = [f"{left_out:,} {are} in the report."] if left_out > 0 else []
        caption = [_plain(part.caption)] if part.caption else []
        return "\n\n".join([_grid(part.columns, part.rows[:MOST_ROWS]), *more, *caption])
    return ""


def _grid(columns: tuple[Column, ...], rows: tuple[tuple[str, ...], ...]) -> str:
    heads = [_plain(column.header) for column in columns]
    rules = [ALIGNED.get(column.align, "---") for column in columns]
    cells = [[_plain(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, rules, *cells])


def _plain(text: str) -> str:
    """Return text on one line that a renderer of Markdown shows as it is."""
    line = " ".join(text.encode("utf-8", errors="replace").decode().split())
    return SPECIAL.sub(r"\\\1", line)
