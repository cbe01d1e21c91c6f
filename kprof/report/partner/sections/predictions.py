"""How right earlier predictions were: each was written down before its change."""

from __future__ import annotations

from kprof.analyze.engagement import ALL_FINDINGS, ALL_SWAPS
from kprof.report.partner.evidence import Evidence, Scored
from kprof.report.partner.parts import Chapter
from kprof.report.partner.wording import marked, percent_range
from kprof.report.section import Column, Table, Text
from kprof.report.units import format_count

TITLE = "Predictions and measurements"
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
    surely = sum(came_true(one) is True and is_sure(one) for one in scored)
    lead += f", {surely} of them with certainty" if surely < right else ""
    open_ones = len(evidence.predictions) - len(scored)
    lead += f"; {open_ones} not measured yet." if open_ones else "."
    if not scored:
        lead = f"{format_count(open_ones, 'prediction')}, none measured yet."
    columns = (
        Column("Finding"),
        Column("Predicted on"),
        Column("Predicted saving", "right"),
        Column("Measured saving", "right"),
        Column("Result"),
    )
    rows = tuple(_row(one, evidence) for one in evidence.predictions)
    caption = (
        "Savings as shares of the step. A prediction came true if the middle of the measured range "
        "lies in the predicted range. It is not certain if the measured range crosses an end of "
        "the predicted one."
    )
    return Chapter(TITLE, (Text(lead), Table(columns, rows, caption)))


def came_true(one: Scored) -> bool | None:
    """Tell whether the saving measured lies in the range predicted; None: not measured yet."""
    if one.measured is None:
        return None
    return one.low <= 1 - one.measured.ratio <= one.high


def is_sure(one: Scored) -> bool:
    """Tell whether the whole measured range lies inside or outside of the predicted one."""
    if one.measured is None:
        return False
    least, most = 1 - one.measured.high, 1 - one.measured.low
    if came_true(one):
        return one.low <= least and most <= one.high
    return most < one.low or one.high < least


def _row(one: Scored, evidence: Evidence) -> tuple[str, ...]:
    advice = evidence.advice.get(one.finding)
    plain = advice.title if advice and advice.title else one.finding.replace("_", " ")
    name = TOGETHER.get(one.finding, plain)
    when = f"{one.recorded_on.isoformat()}{one.source and f', from {one.source}'}"
    predicted = percent_range(one.low, one.high)
    if one.measured is None:
        return (name, when, predicted, "not measured yet", "? Open")
    measured = percent_range(1 - one.measured.high, 1 - one.measured.low)
    tone, told = ("good", "Came true") if came_true(one) else ("warning", "Was off")
    if not is_sure(one):
        tone, told = "plain", f"{told}, not certain"
    return (name, when, predicted, measured, marked(tone, told))
