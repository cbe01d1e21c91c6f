"""Data quality: the checks of the recording, the questions that it leaves open."""

from __future__ import annotations

from kprof.analyze.capture_quality.audit import Check, audit
from kprof.analyze.capture_quality.unanswered import Unanswered, find_unanswered
from kprof.report.section import Column, Part, Section, Table, Text
from kprof.report.summary import VERDICTS
from kprof.report.units import format_count
from kprof.trace import Trace

TITLE = "Data quality"
ORDER = 25


def render(trace: Trace) -> Section:
    """Render the audit's verdicts, the evidence of each, and the questions left open."""
    checks = audit(trace)
    if not checks:
        return Section(TITLE, ORDER, (Text("There is no activity to audit."),), in_terminal=False)
    parts: list[Part] = [Text(_lead(checks))]
    parts += [Text(_told(check), "warning") for check in checks if check.verdict == "bad"]
    parts += [Text(_told(check)) for check in checks if check.verdict == "limited"]
    doubtful = [check for check in checks if check.verdict != "good"]
    passed = [check for check in checks if check.verdict == "good"]
    if doubtful:
        parts.append(_check_table(doubtful))
    if passed:
        parts.append(_passed(passed))
    questions = find_unanswered(trace)
    if questions:
        parts += [Text(_open(questions)), _question_table(questions)]
    return Section(TITLE, ORDER, tuple(parts))


def _lead(checks: list[Check]) -> str:
    verdicts = [check.verdict for check in checks]
    counts = [f"{verdicts.count(v)} {v}" for v in reversed(VERDICTS) if v in verdicts]
    return f"{format_count(len(checks), 'check')} of the recording: {', '.join(counts)}."


def _told(check: Check) -> str:
    return f"{check.name}, {check.verdict}: {check.evidence}. {_sentence(check.meaning)}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _passed(checks: list[Check]) -> Table:
    columns = (Column("Check"), Column("Found", "prose"))
    rows = tuple((check.name, check.evidence) for check in checks)
    folded = f"{format_count(len(checks), 'check')} passed"
    return Table(columns, rows, terminal_rows=0, folded=folded)


def _check_table(checks: list[Check]) -> Table:
    columns = (
        Column("Check"),
        Column("Verdict"),
        Column("Found", "prose"),
        Column("Consequence", "prose"),
        Column("Fix", "prose"),
    )
    ordered = sorted(checks, key=lambda check: VERDICTS.index(check.verdict))
    rows = tuple((c.name, c.verdict, c.evidence, c.meaning, c.fix) for c in ordered)
    caption = (
        "Limited: read affected results with care. Bad: do not use affected results. Unknown: not "
        "recorded."
    )
    return Table(columns, rows, caption, terminal_rows=0)


def _open(questions: list[Unanswered]) -> str:
    number = format_count(len(questions), "question")
    listed = " ".join(found.question for found in questions)
    verb = "is" if len(questions) == 1 else "are"
    return f"{number} {verb} not answered by this recording; the report says why: {listed}"


def _question_table(questions: list[Unanswered]) -> Table:
    columns = (
        Column("Question", "prose"),
        Column("Not known, because", "prose"),
        Column("To find out", "prose"),
    )
    rows = tuple((found.question, found.because, found.fix) for found in questions)
    return Table(columns, rows, "Questions that the recording does not answer.", terminal_rows=0)
