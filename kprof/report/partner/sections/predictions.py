"""How right earlier predictions were: each was written down before its change."""

from __future__ import annotations

from kprof.engagement import ALL_FINDINGS, ALL_SWAPS
from kprof.report.partner.digits import percent_range
from kprof.report.partner.evidence import Evidence, Scored
from kprof.report.partner.parts import Chapter
from kprof.report.partner.wording import marked
from kprof.report.section import Column, Table, Text
from kprof.report.units import format_count

TITLE = "What was predicted, and what came of it"
TOGETHER = {
    ALL_FINDINGS: "all findings together",
    ALL_SWAPS: "all kernels that findings propose, together",
}


def render(evidence: Evidence) -> Chapter | None:
    """Render every prediction with its outcome, and how many came true."""
    if not evidence.predictions:
        return None
    scored = [one for one in evidence.predictions if one.measured is not None]
    right = sum(came_true(one) is True for one in scored)
    lead = f"{right} of {format_count(len(scored), 'prediction')} came true"
    open_ones = len(evidence.predictions) - len(scored)
    lead += f"; {open_ones} not measured yet." if open_ones else "."
    if not scored:
        lead = f"Nothing of {format_count(open_ones, 'prediction')} was measured yet."
    columns = (
        Column("Finding"),
        Column("Predicted on"),
        Column("Predicted saving", "right"),
        Column("Measured saving", "right"),
        Column("Result"),
    )
    rows = tuple(_row(one) for one in evidence.predictions)
    caption = (
        "Savings as shares of the step. A prediction came true where the middle of what was "
        "measured lies in its range."
    )
    return Chapter(TITLE, (Text(lead), Table(columns, rows, caption)))


def came_true(one: Scored) -> bool | None:
    """Tell whether the saving measured lies in the range predicted; None: not measured yet."""
    if one.measured is None:
        return None
    return one.low <= 1 - one.measured.ratio <= one.high


def _row(one: Scored) -> tuple[str, ...]:
    name = TOGETHER.get(one.finding, one.finding.replace("_", " "))
    predicted = percent_range(one.low, one.high)
    if one.measured is None:
        return (name, one.recorded_on.isoformat(), predicted, "not measured yet", "? Open")
    measured = percent_range(1 - one.measured.high, 1 - one.measured.low)
    is_right = bool(came_true(one))
    result = marked("good" if is_right else "warning", "Came true" if is_right else "Was off")
    return (name, one.recorded_on.isoformat(), predicted, measured, result)
