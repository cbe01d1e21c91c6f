"""The audit of the last run, for engineers."""

from __future__ import annotations

from kprof.report.partner.evidence import Evidence
from kprof.report.partner.parts import Chapter, Missing
from kprof.report.partner.sections._run import tables_of
from kprof.report.sections import trust

TITLE = "How far to trust the recording"


def render(evidence: Evidence) -> Chapter | Missing:
    """Render the text and the tables of the run's own section."""
    return tables_of(evidence, TITLE, trust.render, "How far the recording can be trusted")
