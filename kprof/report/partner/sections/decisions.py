"""The decisions of an engagement, with their days."""

from __future__ import annotations

from kprof.report.partner.evidence import Evidence
from kprof.report.partner.parts import Chapter
from kprof.report.section import Column, Table

TITLE = "Decisions"


def render(evidence: Evidence) -> Chapter | None:
    """Render the decisions in the order of their days."""
    if not evidence.decisions:
        return None
    ordered = sorted(evidence.decisions, key=lambda one: one.day)
    rows = tuple((one.day.isoformat(), one.text) for one in ordered)
    return Chapter(TITLE, (Table((Column("Day"), Column("Decision", "prose")), rows),))
