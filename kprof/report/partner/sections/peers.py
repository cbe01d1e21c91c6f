"""The kernels that were swapped in, beside what other libraries have for the same work."""

from __future__ import annotations

from kprof.analyze.kernel_times import Benched
from kprof.report.partner.evidence import Evidence
from kprof.report.partner.parts import Chapter
from kprof.report.partner.wording import time_within
from kprof.report.section import Column, Table, Text
from kprof.report.units import MISSING, format_share

TITLE = "Kernels compared with other libraries"

MEANING = (
    "Each kernel alone, with cold caches. The comparisons above show how much a faster kernel "
    "gains for the whole workload; this table does not."
)
COLUMNS = (
    Column("Work", "prose"),
    Column("Ours", "right"),
    Column("Best of the others", "right"),
    Column("Which"),
    Column("kprof's is", "right"),
    Column("Of a copy", "right"),
    Column("GPU and day", "prose"),
)
CAPTION = "Of a copy: the time of a copy of the same bytes, divided by the time of this kernel."


def render(evidence: Evidence) -> Chapter | None:
    """Render a row for every call that was measured."""
    if not evidence.benches:
        return None
    rows = tuple(_row(one) for one in evidence.benches)
    return Chapter(TITLE, (Text(MEANING), Table(COLUMNS, rows, CAPTION)))


def _row(one: Benched) -> tuple[str, ...]:
    ours, other = one.ours, one.best_other
    return (
        one.what,
        MISSING if ours is None else time_within(ours.gpu_ns, 0.01),
        MISSING if other is None else time_within(other.gpu_ns, 0.01),
        MISSING if other is None else other.provider,
        MISSING if one.ratio is None else f"{one.ratio:.2f} times as fast",
        MISSING if ours is None else format_share(ours.share_of_copy),
        f"{one.gpu}, {one.date}",
    )
