"""What people see: the terminal summary and the offline HTML page."""

from __future__ import annotations

from kprof.discover import modules_in
from kprof.report.section import Section
from kprof.trace import Trace


def sections_of(trace: Trace, *, for_page: bool = True) -> list[Section]:
    """Render the sections of an analyzed trace in their order; the terminal's are fewer."""
    sections = [
        module.render(trace)
        for module in modules_in("kprof.report.sections")
        if for_page or not getattr(module, "FOR_PAGE_ONLY", False)
    ]
    return sorted(sections, key=lambda section: section.order)
