"""Sections that the last run's own report has as well, without figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kprof.report.partner.evidence import Evidence
from kprof.report.partner.parts import Block, Chapter, Missing
from kprof.report.section import Facts, Section, Table, Text
from kprof.report.sections import data_quality, idle, kernels, ledger
from kprof.trace import Trace

HOW = "kprof run train.py, then name the run's folder"


@dataclass(frozen=True)
class Recorded:
    """A section of a run's report under the partner report's title."""

    title: str
    question: str
    """What a reader misses without a run, in words."""
    render_run: Callable[[Trace], Section]

    def render(self, evidence: Evidence) -> Chapter | Missing:
        """Render the last run; its figures are left out, because they need a script."""
        if not evidence.runs:
            return Missing(self.question, HOW)
        parts = self.render_run(evidence.runs[-1]).parts
        blocks: list[Block] = [p for p in parts if isinstance(p, Text | Facts | Table)]
        return Chapter(self.title, tuple(blocks))


SECTIONS = {
    "idle": Recorded("Idle time", "What the device waited for", idle.render).render,
    "kernels": Recorded("Kernels", "Which kernels take the time", kernels.render).render,
    "ledger": Recorded("Ledger", "Whether every nanosecond is accounted for", ledger.render).render,
    "data_quality": Recorded(
        "Data quality", "The data quality of the recording", data_quality.render
    ).render,
}
