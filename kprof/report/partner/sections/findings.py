"""Finding cards: the cost, the fix, the saving with its certainty."""

from __future__ import annotations

from dataclasses import replace

from kprof.analyze.attribution.steps import find_steps
from kprof.findings import Finding, Saving
from kprof.report.partner.evidence import Advice, Evidence
from kprof.report.partner.money import OF_PRICES, worth_in_words
from kprof.report.partner.parts import Block, Card, Chapter, Missing
from kprof.report.partner.sections.time import untraced_share, wait_share
from kprof.report.partner.wording import percent_range, share_in_words, time_within
from kprof.report.section import Table, Text
from kprof.report.sections.findings import evidence_of
from kprof.report.units import UNKNOWN, format_count
from kprof.trace import Trace

TITLE = "Findings"

MOST_CARDS = 12
LARGE, SMALL = 0.05, 0.01
"""Shares of the step: from the first on a finding is P1, from the second on P2."""
EFFORT = {
    "low": "low: a setting",
    "medium": "medium: some lines of code",
    "high": "high: a project of its own",
}
SAVINGS = (
    "P1: the middle of the predicted saving is at least 5 % of the time, and the confidence is not "
    "low. P2: at least 1 %. P3: less, or unknown. Savings are predicted from the recording; a "
    "card's details say how. They overlap, so they do not add up."
)
UNTRACED = 0.1
"""Share of the device time without an operator from which an unseen finding may still be there."""
HOW = "kprof run train.py, then name the run's folder"


def render(evidence: Evidence) -> Chapter | Missing:
    """Render a card for every finding of the first run and of the last one."""
    if not evidence.runs or all(run.diagnosis is None for run in evidence.runs):
        return Missing("Findings: what costs time and how to fix it", HOW)
    cards, prices = _cards(evidence)
    if not cards:
        nothing = "No rule found a change that would save time."
        return Chapter(TITLE, (Text(nothing, "good"),))
    blocks: list[Block] = []
    if together := _together(evidence.runs[-1]):
        blocks.append(Text(together))
    blocks += [*cards[:MOST_CARDS], Text(SAVINGS, "muted")]
    blocks += [Text(f"At list prices: of {price}.", "muted") for price in prices]
    if len(cards) > MOST_CARDS:
        left = len(cards) - MOST_CARDS
        blocks.append(Text(f"{left} more with smaller savings are in the run's report.", "muted"))
    return Chapter(TITLE, tuple(blocks))


def _cards(evidence: Evidence) -> tuple[list[Card], list[str]]:
    """Return the cards, those without a known saving last, and the prices behind their money."""
    first, last = evidence.runs[0], evidence.runs[-1]
    # A single run shows the present state, unless a comparison changed something after it.
    is_changed = first is not last or bool(evidence.comparisons)
    cards: list[Card] = []
    prices: dict[str, None] = {}
    for finding, run, status in _stated(first, last):
        assert run.diagnosis is not None
        is_before = run is first and is_changed
        money = worth_in_words(finding.saving, run.diagnosis.price, is_before, evidence)
        amount, _, basis = money.partition(OF_PRICES)
        if basis:
            prices.setdefault(basis)
            money = f"{amount}, at list prices"
        facts = [
            ("Saves", saving_in_words(finding.saving, run.diagnosis.whole)),
            *([] if run.is_host_only else [("In money", money)]),
        ]
        cards.append(_card(finding, run, facts, status, evidence))
    return sorted(cards, key=lambda card: not card.sort_by), list(prices)


def _stated(first: Trace, last: Trace) -> list[tuple[Finding, Trace, str]]:
    """Return the findings of the first run, then those new in the last: with run and status.

    A finding of both runs is reported from the last one: its saving is what a fix saves now.
    """
    before, after = _found_in(first), _found_in(last)
    if first is last:
        return [(one, first, "") for one in before.values()]
    new = [rule for rule in after if rule not in before]
    return [
        *(
            (after[rule], last, "still found after the change")
            if rule in after
            else (one, first, _gone(one, first, last))
            for rule, one in before.items()
        ),
        *((after[rule], last, "new: found only after the change") for rule in new),
    ]


def _found_in(run: Trace) -> dict[str, Finding]:
    """Return the findings of a run, by the name of their rule."""
    found: dict[str, Finding] = {}
    for one in run.diagnosis.findings if run.diagnosis else ():
        found.setdefault(one.rule, one)
    return found


def _gone(finding: Finding, first: Trace, last: Trace) -> str:
    """Say that a finding is gone, or why the last run cannot tell."""
    if last.diagnosis is None:
        return ""
    not_applicable = {one.rule: one.because for one in last.diagnosis.not_applicable}
    if finding.rule in not_applicable:
        return f"? not checked after the change: {not_applicable[finding.rule]}"
    untraced = untraced_share(last)
    rests_on_operators = first.kernels["op"].iloc[list(finding.rows)].notna().any()
    if untraced >= UNTRACED and rests_on_operators:
        share = share_in_words(untraced)
        return f"? not seen after the change, where {share} of the device time has no operator"
    waits = wait_share(last, finding.fix.idle_cause)
    if waits is not None and waits >= LARGE:
        return f"? less of it, but {share_in_words(waits)} of the time is still spent so"
    return "✓ no longer found after the change"


def _card(
    finding: Finding, run: Trace, facts: list[tuple[str, str]], status: str, evidence: Evidence
) -> Card:
    facts += [("Confidence", finding.confidence), ("Effort", EFFORT[finding.effort])]
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
    details.append(_proof(finding, run))
    return Card(
        title_of(finding, evidence),
        grade_of(finding),
        tuple(facts),
        tuple(body),
        tuple(details),
        # Cards whose saving is not known come last.
        middle_of(finding.saving) or 0.0,
    )


def _proof(finding: Finding, run: Trace) -> Table:
    """Return the evidence of a finding; its caption says over how many steps."""
    steps = len(find_steps(run)) if run.meta.num_ranks == 1 else 0
    span = f", in {format_count(steps, 'recorded step')} together" if steps else ""
    kept = len(finding.rows) + len(finding.idle_rows)
    of = finding.num_rows + finding.num_idle_rows
    which = f": the {kept:,} that took longest, of {of:,}" if of > kept else ""
    return replace(evidence_of(run, finding), caption=f"Evidence{span}{which}.")


def title_of(finding: Finding, evidence: Evidence) -> str:
    """Return the title of a finding's playbook, else the name of its rule."""
    name = finding.rule.replace("_", " ")
    advice = evidence.advice.get(finding.rule)
    return advice.title if advice and advice.title else f"{name[:1].upper()}{name[1:]}"


def _action(finding: Finding, advice: Advice | None) -> list[Text]:
    sentences = [f"What to do: {advice.how[0]}"] if advice and advice.how else []
    sentences.append(f"To confirm and fix it: kprof playbook {finding.playbook}")
    if finding.command:
        sentences.append(f"To prove the gain: {finding.command}")
    return [Text(sentence) for sentence in sentences]


def middle_of(saving: Saving | None) -> float | None:
    """Return the middle of a saving as a share of the step; None where it is not known."""
    if saving is None or saving.middle_ns is None:
        return None
    return saving.middle_ns / max(saving.step_ns, 1)


def grade_of(finding: Finding) -> str:
    """Return P1, P2 or P3; the last where the saving is not known."""
    middle = middle_of(finding.saving)
    if middle is None:
        return "P3"
    if middle >= LARGE and finding.confidence != "low":
        return "P1"
    return "P2" if middle >= SMALL else "P3"


def saving_in_words(saving: Saving | None, whole: str) -> str:
    """Format a saving as a share and in time, or as unknown."""
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
    return f"All findings of this run, fixed together, would save {saves}."
