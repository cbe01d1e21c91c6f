"""The books of the last run, for engineers."""

from __future__ import annotations

from kprof.report.partner.evidence import Evidence
from kprof.report.partner.parts import Chapter, Missing
from kprof.report.partner.sections._run import tables_of
from kprof.report.sections import ledger

TITLE = "The books"


def render(evidence: Evidence) -> Chapter | Missing:
    """Render the text and the tables of the run's own section."""
    return tables_of(evidence, TITLE, ledger.render, "Whether every nanosecond is accounted for")
