"""The caveats: doubts about results, and gaps of the recording."""

from __future__ import annotations

from kprof.analyze.capture_quality.audit import audit
from kprof.analyze.capture_quality.unanswered import find_unanswered
from kprof.report.partner.evidence import Evidence
from kprof.report.partner.mixed import say_mixed
from kprof.report.partner.parts import Block, Chapter, Folded
from kprof.report.partner.sections.service_level import target_in_words
from kprof.report.partner.wording import without_letters
from kprof.report.section import Column, Table, Text
from kprof.report.sla_verdict import Judged
from kprof.report.units import format_count

TITLE = "Caveats"

DOUBTFUL = ("bad", "limited")


def render(evidence: Evidence) -> Chapter:
    """Render every doubt with its subject, and the questions that stay open."""
    rows = _doubts(evidence)
    questions = [
        (one.question, one.because, one.fix)
        for run in evidence.runs[-1:]
        for one in find_unanswered(run)
    ]
    blocks: list[Block] = []
    if rows:
        blocks.append(Text(f"{format_count(len(rows), 'caveat')} to the results above."))
        columns = (Column("Concerns"), Column("Caveat", "prose"))
        blocks.append(Table(columns, tuple(rows), "Doubts and limits, by subject."))
    else:
        blocks.append(Text("No caveats are known.", "good"))
    if questions:
        headers = ("Question", "Not answered because", "To answer it")
        title = f"{format_count(len(questions), 'question')} that the recording cannot answer"
        blocks.append(
            Folded(
                title,
                Table(
                    tuple(Column(header, "prose") for header in headers), tuple(questions), title
                ),
            )
        )
    return Chapter(TITLE, tuple(blocks))


def _doubts(evidence: Evidence) -> list[tuple[str, str]]:
    rows = [("Report", text) for text in say_mixed(evidence)]
    for comparison in evidence.comparisons:
        rows += [("Comparison", without_letters(doubt.text)) for doubt in comparison.doubts]
    for judged in evidence.service_levels:
        rows += [
            ("Service level", _doubt(doubt.text, judged)) for doubt in judged.assessment.doubts
        ]
    for costs in evidence.costs:
        rows += [("Cost", warning) for warning in costs.warnings]
    if evidence.calibration is not None:
        calibration = evidence.calibration
        rows += [("Calibration", doubt.text) for doubt in calibration.doubts]
        rows += [("Calibration", f"Not measured: {what}.") for what in calibration.missing]
        rows += [
            ("Calibration", f"Target missed: {target.name}, {target.where}.")
            for target in calibration.targets
            if not target.is_met
        ]
    for number, run in enumerate(evidence.runs):
        about = _name_of(number, len(evidence.runs))
        rows += [(about, caveat.text) for caveat in run.meta.caveats]
        for check in audit(run):
            if check.verdict in DOUBTFUL:
                found = f"{_sentence(f'{check.name}: {check.evidence}')} {_sentence(check.meaning)}"
                rows.append((about, found.strip()))
    return list(dict.fromkeys(rows))


def _name_of(number: int, num_runs: int) -> str:
    """Name the recording that a doubt is about, as the other sections do."""
    if num_runs == 1:
        return "Recording"
    between = f"Recording {number + 1}"
    return {0: "Recording before", num_runs - 1: "Recording after"}.get(number, between)


def _doubt(text: str, judged: Judged) -> str:
    """Say a doubt about a target with its target in words, in the place of what was typed."""
    for judgement in judged.assessment.judgements:
        target, colon, doubt = text.partition(": ")
        if colon and target == judgement.target.text:
            return f"{_sentence(target_in_words(judgement))} {_sentence(doubt)}"
    return _sentence(text)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""
