"""What people see: the terminal summary and the offline HTML page."""

from __future__ import annotations

from kprof.discover import modules_in
from kprof.report.section import Section
from kprof.trace import Trace


def sections_of(trace: Trace) -> list[Section]:
    """Render every section of an analyzed trace, in the order of the report."""
    sections = [module.render(trace) for module in modules_in("kprof.report.sections")]
    return sorted(sections, key=lambda section: section.order)
