"""Finding cards: what costs time, what to do about it, what that brings and how sure it is."""

from __future__ import annotations

from kprof.finding import Finding, Saving
from kprof.report.partner.digits import percent_range, time_within
from kprof.report.partner.evidence import Advice, Evidence
from kprof.report.partner.money import worth_in_words
from kprof.report.partner.parts import Block, Card, Chapter, Missing
from kprof.report.partner.wording import share_in_words
from kprof.report.section import Table, Text
from kprof.report.sections.findings import evidence_of
from kprof.report.units import UNKNOWN
from kprof.trace import Trace

TITLE = "What was found"

MOST_CARDS = 12
LARGE, SMALL = 0.05, 0.01
"""Shares of the step: from the first on a finding is P1, from the second on P2."""
EFFORT = {
    "low": "low: a setting",
    "medium": "medium: some lines of code",
    "high": "high: a project of its own",
}
SAVINGS = (
    "P1: saves 5 % of the time or more, in the middle of its range, and is not in doubt. P2: 1 % "
    "or more. P3: less, or nobody knows. Savings are predicted by replaying the recording. They "
    "do not add up, as some overlap."
)
HOW = "kprof run train.py, then name the run's folder"


def render(evidence: Evidence) -> Chapter | Missing:
    """Render a card for every finding of the first run, and for those new in the last one."""
    if not evidence.runs or all(run.diagnosis is None for run in evidence.runs):
        return Missing("What costs time, and what to do about it", HOW)
    cards = _cards(evidence)
    if not cards:
        nothing = "No rule found anything that would be worth a change."
        return Chapter(TITLE, (Text(nothing, "good"),))
    blocks: list[Block] = []
    if together := _together(evidence.runs[-1]):
        blocks.append(Text(together))
    blocks += [*cards[:MOST_CARDS], Text(SAVINGS, "muted")]
    if len(cards) > MOST_CARDS:
        left = len(cards) - MOST_CARDS
        blocks.append(Text(f"{left} more, less promising, are in the run's own report.", "muted"))
    return Chapter(TITLE, tuple(blocks))


def _cards(evidence: Evidence) -> list[Card]:
    first, last = evidence.runs[0], evidence.runs[-1]
    remaining = {one.rule for one in last.diagnosis.findings} if last.diagnosis else None
    is_one = first is last
    shown = []
    seen = set()
    # What a single run shows is what is there now, unless a change was compared with it.
    is_before = not is_one or bool(evidence.comparisons)
    for run, when in ((first, ""), (last, "only after the change")):
        if run.diagnosis is None or (is_one and when):
            continue
        for finding in run.diagnosis.findings:
            if finding.rule in seen:
                continue
            seen.add(finding.rule)
            status = when
            if not is_one and not when and remaining is not None:
                is_gone = finding.rule not in remaining
                status = "✓ no longer found after the change" if is_gone else "still found after it"
            money = worth_in_words(
                finding.saving, run.diagnosis.price, is_before and not when, evidence
            )
            facts = [
                ("Saves", saving_in_words(finding.saving, run.diagnosis.whole)),
                *([] if run.is_host_only else [("In money", money)]),
            ]
            shown.append(_card(finding, run, facts, status, evidence))
    return shown


def _card(
    finding: Finding, run: Trace, facts: list[tuple[str, str]], status: str, evidence: Evidence
) -> Card:
    facts += [("How sure", finding.confidence), ("Effort", EFFORT[finding.effort])]
    if status:
        facts.append(("Status", status))
    advice = evidence.advice.get(finding.rule)
    body = [Text(f"{finding.claim}."), *_action(finding, advice)]
    details: list[Text | Table] = []
    if advice and advice.how[1:]:
        details.append(Text(f"Other ways: {' '.join(advice.how[1:])}"))
    details += [Text(detail) for detail in finding.details]
    if finding.saving is not None:
        details.append(Text(f"How the saving was predicted: {finding.saving.basis}."))
    details.append(evidence_of(run, finding))
    return Card(
        title_of(finding, evidence),
        grade_of(finding),
        tuple(facts),
        tuple(body),
        tuple(details),
        middle_of(finding.saving),
    )


def title_of(finding: Finding, evidence: Evidence) -> str:
    """Return what a finding is called in plain words, else the name of its rule."""
    name = finding.rule.replace("_", " ")
    advice = evidence.advice.get(finding.rule)
    return advice.title if advice and advice.title else f"{name[:1].upper()}{name[1:]}"


def _action(finding: Finding, advice: Advice | None) -> list[Text]:
    sentences = [f"What to do: {advice.how[0]}"] if advice and advice.how else []
    sentences.append(f"To confirm and mend it: kprof playbook {finding.playbook}")
    if finding.command:
        sentences.append(f"To prove the gain: {finding.command}")
    return [Text(sentence) for sentence in sentences]


def middle_of(saving: Saving | None) -> float:
    """Return the middle of a saving as a share of the step; 0 where nobody knows."""
    return saving.middle_ns / max(saving.step_ns, 1) if saving else 0.0


def grade_of(finding: Finding) -> str:
    """Return P1, P2 or P3."""
    middle = middle_of(finding.saving)
    if middle >= LARGE and finding.confidence != "low":
        return "P1"
    return "P2" if middle >= SMALL else "P3"


def saving_in_words(saving: Saving | None, whole: str) -> str:
    """Write a saving as a share and in time, or that nobody knows it."""
    if saving is None or saving.high_ns is None:
        return UNKNOWN
    step, low, high = max(saving.step_ns, 1), max(saving.low_ns or 0, 0), saving.high_ns
    if low <= 0:
        return f"up to {share_in_words(high / step)} of {whole} ({time_within(high, 0.1)})"
    times = f"{time_within(low, 0.1)} to {time_within(high, 0.1)}"
    return f"{percent_range(low / step, high / step)} of {whole} ({times})"


def _together(run: Trace) -> str:
    together = run.diagnosis.together if run.diagnosis else None
    if together is None or not together.high_ns or run.diagnosis is None:
        return ""
    saves = saving_in_words(together, run.diagnosis.whole)
    return f"All of what is still to be found here, mended together, would save {saves}."
