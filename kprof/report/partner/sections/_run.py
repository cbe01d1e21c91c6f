"""Sections of a run's own report, taken over without their figures: these need a script."""

from __future__ import annotations

from collections.abc import Callable

from kprof.report.partner.evidence import Evidence
from kprof.report.partner.parts import Block, Chapter, Missing
from kprof.report.section import Facts, Section, Table, Text
from kprof.trace import Trace

HOW = "kprof run train.py, then name the run's folder"


def tables_of(
    evidence: Evidence, title: str, render: Callable[[Trace], Section], question: str
) -> Chapter | Missing:
    """Return what the section says of the last run, in text and tables."""
    if not evidence.runs:
        return Missing(question, HOW)
    parts = render(evidence.runs[-1]).parts
    blocks: list[Block] = [p for p in parts if isinstance(p, Text | Facts | Table)]
    return Chapter(title, tuple(blocks))
