"""The partner report: one HTML file for decision makers, made from saved evidence alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kprof.report.partner.disclosure import MARKS, Level, Redactor, reduced
from kprof.report.partner.evidence import Evidence
from kprof.report.partner.page import render_page
from kprof.report.partner.parts import Chapter, Folded, Missing, Template, all_sections
from kprof.report.section import Column, Table

NOT_HERE = "Missing from this report, and how to add it"
CAVEATS = "caveats"


def render_report(evidence: Evidence, template: Template, level: Level) -> str:
    """Return the text of the page: the same evidence gives the same text."""
    redactor = Redactor(level, evidence)
    chapters = [redactor.apply(one) for one in chapters_of(reduced(evidence, level), template)]
    day = evidence.day
    subtitle = f"Evidence up to {day:%Y-%m-%d}" if day else "Evidence without a date"
    return render_page(redactor.clean(evidence.title), subtitle, MARKS[level], chapters)


def chapters_of(evidence: Evidence, template: Template) -> list[Chapter]:
    """Render the sections of a template, and list with the caveats what is not there."""
    sections = all_sections()
    chapters: list[Chapter] = []
    missing: list[Missing] = []
    place = None
    for name in template.sections:
        found = sections[name](evidence)
        if isinstance(found, Missing):
            missing.append(found)
        elif isinstance(found, Chapter):
            place = len(chapters) if name == CAVEATS else place
            chapters.append(replace(found, title=template.titles.get(name, found.title)))
    if missing and place is not None:
        chapters[place] = replace(
            chapters[place], blocks=(*chapters[place].blocks, _list_of(missing))
        )
    elif missing:
        chapters.append(Chapter(NOT_HERE, (_list_of(missing).table,)))
    return chapters


def _list_of(missing: Iterable[Missing]) -> Folded:
    columns = (Column("Missing", "prose"), Column("To add it", "prose"))
    rows = tuple((one.what, one.how) for one in missing)
    return Folded(NOT_HERE, Table(columns, rows, NOT_HERE))
