"""An engagement as sections: what was predicted, tried, measured and decided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kprof.analyze.engagement import (
    ALL_SWAPS,
    BenchAdded,
    CalibrationAdded,
    ComparisonAdded,
    CostAdded,
    Decided,
    Engagement,
    Entry,
    GateAdded,
    Opened,
    PredictionAdded,
    RunAdded,
    ServiceLevelAdded,
)
from kprof.analyze.findings.scores import Promise, Score, Scores, score
from kprof.report.comparison import format_interval, format_percent
from kprof.report.engagement_sides import section_of_benches, section_of_gates, section_of_sides
from kprof.report.section import Column, Facts, Part, Section, Table, Text
from kprof.report.units import MISSING, UNKNOWN, format_count, shorten

NONE_SCORED = "none scored yet"
HASH_DIGITS = 16
DAY = 10
LONGEST_NAME = 100
ERROR = (
    "Error: the middle of the predicted interval less what was measured, in points: hundredths of "
    "A's step. Above 0, too much was promised."
)


def sections_of_engagement(engagement: Engagement) -> list[Section]:
    """Render where the engagement stands."""
    scores = score(engagement)
    sections = [_overview(engagement, scores), _predictions(scores)]
    sections += [part for part in (_tried(engagement), section_of_sides(engagement)) if part]
    sections += [part for part in (section_of_gates(engagement),) if part]
    sections += [part for part in (section_of_benches(engagement), _decisions(engagement)) if part]
    return [*sections, _entries(engagement)]


def _overview(engagement: Engagement, scores: Scores) -> Section:
    first, last = engagement.entries[0], engagement.entries[-1]
    facts = Facts(
        (
            ("Begun", first.date[:DAY], engagement.name),
            (
                "Last entry",
                last.date[:DAY],
                format_count(len(engagement.entries), "entry", "entries"),
            ),
            ("Predictions", _scored_in_words(scores), _error_in_words(scores)),
        )
    )
    return Section("Engagement", 0, (facts,))


def _scored_in_words(scores: Scores) -> str:
    if not scores.scored:
        return NONE_SCORED
    return f"{len(scores.scored)} scored"


def _error_in_words(scores: Scores) -> str:
    """Return the mean errors and their count, or how many predictions wait for an A/B."""
    waiting = sum(one.predicted.source != "what-if" for one in scores.untested)
    wait = f"{format_count(waiting, 'prediction')} not tested yet, answers to what-if apart"
    absolute, signed = scores.mean_absolute_error, scores.mean_error
    if absolute is None or signed is None:
        return wait
    return (
        f"mean error {_points(absolute).lstrip('+')} absolute, {_points(signed)} signed; "
        f"{scores.num_inside} of {len(scores.scored)} inside, {scores.num_surely_inside} of them "
        f"surely; {wait}"
    )


def _points(share: float) -> str:
    return f"{100 * share:+.1f} points"


def _predictions(scores: Scores) -> Section:
    if not scores.scored:
        lead = f"Predictions against measurements: {NONE_SCORED}."
    else:
        lead = f"Predictions against measurements: {_error_in_words(scores)}."
    parts: list[Part] = [Text(lead)]
    if scores.scored:
        parts.append(_score_table(scores.scored))
        parts += [Text(f"{one.name}: {doubt}.") for one in scores.scored for doubt in one.doubts]
    parts += [
        Text(f"Entry {one.entry}, {one.name}: not scored, {one.why}.") for one in scores.unscored
    ]
    if scores.untested:
        parts.append(_promise_table(scores.untested))
    return Section("Predictions", 10, tuple(parts))


def _score_table(scores: Sequence[Score]) -> Table:
    columns = (
        Column("Change", "name"),
        Column("Predicted", "right"),
        Column("Measured", "right"),
        Column("Interval", "right", essential=False),
        Column("Inside"),
        Column("Error", "right"),
    )
    rows = tuple(
        (
            one.name,
            _gains(one.predicted),
            f"{100 * one.measured:.1f} %",
            _gains(one.interval),
            _inside(one),
            _points(one.error),
        )
        for one in scores
    )
    return Table(columns, rows, ERROR, terminal_rows=len(rows))


def _inside(one: Score) -> str:
    return ("yes" if one.is_inside else "no") + ("" if one.is_clear else ", not surely")


def _gains(ends: tuple[float, float]) -> str:
    low, high = (f"{100 * end:.1f}" for end in ends)
    return f"{low} %" if low == high else f"{low} to {high} %"


def _promise_table(promises: Sequence[Promise]) -> Table:
    columns = (
        Column("Not tested yet", "name"),
        Column("Saves of a step", "right"),
        Column("Written down"),
        Column("Entry", "right", essential=False),
        Column("To prove it", "prose", essential=False),
    )
    ordered = sorted(promises, key=lambda one: one.predicted.source == "what-if")
    rows = tuple(
        (
            shorten(one.predicted.name, LONGEST_NAME),
            UNKNOWN if one.predicted.shares is None else _gains(one.predicted.shares),
            one.entry.date[:DAY],
            str(one.entry.number),
            one.predicted.command or MISSING,
        )
        for one in ordered
    )
    return Table(columns, rows, "Predictions that no A/B tests yet; those of what-if come last.")


def _tried(engagement: Engagement) -> Section | None:
    tried = engagement.of(ComparisonAdded)
    if not tried:
        return None
    columns = (
        Column("Entry", "right", essential=False),
        Column("B", "name"),
        Column("Verdict"),
        Column("Change", "right"),
        Column("Interval", "right"),
        Column("Pairs", "right", essential=False),
        Column("Metric", essential=False),
    )
    rows = []
    for entry, added in tried:
        for claim in added.comparison.claims:
            of = claim.interval
            change = (format_percent(of.ratio), format_interval(of)) if of else (MISSING, MISSING)
            what = (str(entry.number), added.comparison.b, claim.verdict, *change)
            rows.append((*what, str(claim.num_pairs), claim.metric.name))
    caption = "B against A; SAME is proven, and INCONCLUSIVE is neither that nor a difference."
    return Section("Tried", 20, (Table(columns, tuple(rows), caption, terminal_rows=len(rows)),))


def _decisions(engagement: Engagement) -> Section | None:
    decided = engagement.of(Decided)
    if not decided:
        return None
    lines = tuple(Text(f"{entry.date[:DAY]}: {one.text}") for entry, one in decided)
    return Section("Decisions", 50, lines)


def _entries(engagement: Engagement) -> Section:
    columns = (
        Column("Entry", "right"),
        Column("Date"),
        Column("What", "name"),
        Column("From", "name"),
        Column("SHA-256", essential=False),
    )
    rows = tuple(
        (
            str(one.number),
            one.date,
            describe(one),
            one.source.name if one.source else MISSING,
            one.source.sha256[:HASH_DIGITS] if one.source else MISSING,
        )
        for one in engagement.entries
    )
    return Section("Entries", 60, (Table(columns, rows, terminal_rows=0),), in_terminal=False)


def describe(entry: Entry) -> str:
    """Return what an entry holds, in a few words."""
    return WORDS[type(entry.content)](entry.content)


def _of_run(run: RunAdded) -> str:
    # What all swaps would save together is promised besides, and named after no rule.
    counted = sum(one.source == "finding" and one.name != ALL_SWAPS for one in run.predictions)
    return f"run {run.when}, {format_count(counted, 'finding')}"


WORDS: dict[type, Callable[[Any], str]] = {
    Opened: lambda one: "begun",
    RunAdded: _of_run,
    PredictionAdded: lambda one: f"prediction: {one.predicted.name}",
    ComparisonAdded: lambda one: f"{one.comparison.headline.verdict}: {one.comparison.b}",
    ServiceLevelAdded: lambda one: f"service level {one.when}: {one.verdict.lower()}",
    CostAdded: lambda one: f"cost {one.when}",
    GateAdded: lambda one: f"quality gate of {', '.join(one.subjects)}",
    BenchAdded: lambda one: f"{format_count(len(one.calls), 'call')} beside their peers",
    CalibrationAdded: lambda one: "calibration: how often verdicts err",
    Decided: lambda one: f"decision: {one.text}",
}
