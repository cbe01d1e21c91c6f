"""The kernels of the last run, for engineers."""

from __future__ import annotations

from kprof.report.partner.evidence import Evidence
from kprof.report.partner.parts import Chapter, Missing
from kprof.report.partner.sections._run import tables_of
from kprof.report.sections import kernels

TITLE = "Kernels"


def render(evidence: Evidence) -> Chapter | Missing:
    """Render the text and the tables of the run's own section."""
    return tables_of(evidence, TITLE, kernels.render, "Which kernels take the time")
