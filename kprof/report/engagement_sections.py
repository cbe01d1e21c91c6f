"""An engagement as sections, as plain data, or as test cases for a CI server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from kprof.analyze.engagement import (
    ALL_SWAPS,
    BenchAdded,
    CalibrationAdded,
    ComparisonAdded,
    CostAdded,
    Decided,
    Engagement,
    Entry,
    Figure,
    GateAdded,
    Holding,
    Opened,
    PredictionAdded,
    RunAdded,
    ServiceLevelAdded,
    TargetJudged,
    When,
)
from kprof.analyze.findings.scores import RecordedPrediction, Score, Scores, score
from kprof.analyze.verdict.regressions import rule_on_comparison
from kprof.report.comparison_sections import format_interval, format_percent
from kprof.report.junit import Case, Outcome
from kprof.report.partner.evidence import gates_in
from kprof.report.partner.wording import gained, within
from kprof.report.regression import cases_of_rulings
from kprof.report.section import Column, Facts, Part, Section, Table, Text
from kprof.report.units import MISSING, UNKNOWN, format_count, format_time, shorten

SCHEMA = 1
NONE_SCORED = "none scored yet"
HASH_DIGITS = 16
DAY = 10
MOST_DIGITS = 4
LONGEST_NAME = 100
ERROR = (
    "Error: the middle of the predicted interval minus the measurement, in points: hundredths of "
    "A's step. Above 0, the prediction was too high."
)
OF_TARGETS: dict[str, Outcome] = {"MET": "passed", "MISSED": "failed"}
OF_LEVELS: dict[str, Outcome] = {"passed": "passed", "failed": "failed"}


def sections_of_engagement(engagement: Engagement) -> list[Section]:
    """Render where the engagement stands."""
    scores = score(engagement)
    optional = (
        _tried(engagement),
        _section_of_sides(engagement),
        _section_of_gates(engagement),
        _section_of_benches(engagement),
        _decisions(engagement),
    )
    return [
        _overview(engagement, scores),
        _predictions(scores),
        *(section for section in optional if section),
        _entries(engagement),
    ]


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
        parts.append(_untested_table(scores.untested))
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


def _untested_table(predictions: Sequence[RecordedPrediction]) -> Table:
    columns = (
        Column("Not tested yet", "name"),
        Column("Saves of a step", "right"),
        Column("Written down"),
        Column("Entry", "right", essential=False),
        Column("To prove it", "prose", essential=False),
    )
    ordered = sorted(predictions, key=lambda one: one.predicted.source == "what-if")
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
    return Table(
        columns, rows, "Predictions that no A/B tests yet; those of kprof whatif come last."
    )


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
    caption = "B relative to A. SAME is a proven verdict; INCONCLUSIVE proves nothing."
    return Section("Tried", 20, (Table(columns, tuple(rows), caption, terminal_rows=len(rows)),))


def _section_of_sides(engagement: Engagement) -> Section | None:
    """Lay the last run, service level and cost before the change beside those after it."""
    rows = [*_step_rows(engagement), *_target_rows(engagement), *_cost_rows(engagement)]
    if not rows:
        return None
    columns = (Column("What", "name"), Column("Before", "right"), Column("After", "right"))
    caption = (
        "The newest measurement of each, made separately. The comparisons prove differences; this "
        "table does not."
    )
    return Section(
        "Before and after", 30, (Table(columns, tuple(rows), caption, terminal_rows=40),)
    )


def _newest(engagement: Engagement, kind: type[Holding], when: When) -> Holding | None:
    found = [one for _, one in engagement.of(kind) if getattr(one, "when", None) == when]
    return found[-1] if found else None


def _sides(
    engagement: Engagement, kind: type[Holding], told: Callable[[Holding], dict[str, str]]
) -> list[tuple[str, str, str]]:
    """Return what is told of the newest before and after, by name; a dash where one has none."""
    ends: list[When] = ["before", "after"]
    sides = [told(one) if (one := _newest(engagement, kind, end)) else {} for end in ends]
    names = dict.fromkeys([*sides[0], *sides[1]])
    return [(name, *(side.get(name, MISSING) for side in sides)) for name in names]  # type: ignore[misc]


def _step_rows(engagement: Engagement) -> list[tuple[str, str, str]]:
    def told(run: Holding) -> dict[str, str]:
        assert isinstance(run, RunAdded)
        if run.unrecorded_step_ns is not None:
            return {"step, median": format_time(run.unrecorded_step_ns)}
        if run.step_ns is None:
            return {}
        return {"step while recorded, median": format_time(run.step_ns)}

    return _sides(engagement, RunAdded, told)


def _target_rows(engagement: Engagement) -> list[tuple[str, str, str]]:
    def told(level: Holding) -> dict[str, str]:
        assert isinstance(level, ServiceLevelAdded)
        return {one.target: f"{one.verdict.lower()}, {_measured(one)}" for one in level.targets}

    return _sides(engagement, ServiceLevelAdded, told)


def _measured(target: TargetJudged) -> str:
    if target.estimate is None or isinstance(target.estimate, str):
        return MISSING if target.estimate is None else "no answer"
    if target.unit == "ns":
        return format_time(target.estimate)
    return f"{target.estimate:.4g} {target.unit}".rstrip()


def _cost_rows(engagement: Engagement) -> list[tuple[str, str, str]]:
    def told(cost: Holding) -> dict[str, str]:
        assert isinstance(cost, CostAdded)
        units = [one.unit for one in cost.figures]
        return {f"{gained(one.name, units)}, {one.unit}": _banded(one) for one in cost.figures}

    return _sides(engagement, CostAdded, told)


def _banded(figure: Figure) -> str:
    low, middle, high = within(figure.low, figure.mid, figure.high, MOST_DIGITS)
    return middle if figure.low == figure.high else f"{middle} ({low} to {high})"


def _section_of_gates(engagement: Engagement) -> Section | None:
    """Show which levels of the gate each replacement passed; None: none was checked."""
    found = gates_in(said for _, gate in engagement.of(GateAdded) for said in gate.said)
    if not found:
        return None
    columns = (Column("Replacement", "name"), Column("Levels", "name"), Column("Class"))
    rows = tuple(
        (
            one.subject,
            ", ".join(f"{level} {one[level].state}" for level in one.asked),
            one.reached or UNKNOWN,
        )
        for one in found
    )
    return Section("Quality gate", 40, (Table(columns, rows, terminal_rows=len(rows)),))


def _section_of_benches(engagement: Engagement) -> Section | None:
    """Show every call beside the best of its peers; None: none was measured."""
    calls = [call for _, bench in engagement.of(BenchAdded) for call in bench.calls]
    if not calls:
        return None
    columns = (
        Column("Kernel alone", "name"),
        Column("Ours", "right"),
        Column("Best other", "right"),
        Column("Which"),
        Column("kprof's is", "right"),
    )
    rows = tuple(
        (
            one.what,
            format_time(one.ours.gpu_ns if one.ours else None),
            format_time(one.best_other.gpu_ns if one.best_other else None),
            one.best_other.provider if one.best_other else MISSING,
            MISSING if one.ratio is None else f"{one.ratio:.2f} times as fast",
        )
        for one in calls
    )
    return Section(
        "Compared with other libraries", 42, (Table(columns, rows, terminal_rows=len(rows)),)
    )


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
    # The saving of all swaps together is a prediction as well, and named after no rule.
    told = [one for one in run.predictions if one.source == "finding" and one.name != ALL_SWAPS]
    number = len(told) if run.num_findings is None else run.num_findings
    predict = sum(one.shares is not None for one in told)
    without = "" if predict == number else f", {predict:,} with a predicted saving"
    return f"run {run.when}, {format_count(number, 'finding')}{without}"


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


def result_of_engagement(engagement: Engagement) -> dict[str, object]:
    """Return all entries and the scores as plain data; unknown as None."""
    return {
        "schema": SCHEMA,
        "name": engagement.name,
        "predictions": _scores_result(score(engagement)),
        "entries": msgspec.to_builtins(engagement.entries),
    }


def json_of_engagement(engagement: Engagement) -> bytes:
    """Return the same as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(result_of_engagement(engagement)))


def _scores_result(scores: Scores) -> dict[str, object]:
    return {
        "num_scored": len(scores.scored),
        "num_inside": scores.num_inside if scores.scored else None,
        "num_surely_inside": scores.num_surely_inside if scores.scored else None,
        "mean_absolute_error": scores.mean_absolute_error,
        "mean_error": scores.mean_error,
        "scored": [_score_result(one) for one in scores.scored],
        "unscored": [asdict(one) for one in scores.unscored],
        "untested": [
            {"entry": one.entry.number, **msgspec.to_builtins(one.predicted)}
            for one in scores.untested
        ],
    }


def _score_result(one: Score) -> dict[str, object]:
    told = {"error": one.error, "is_inside": one.is_inside, "is_clear": one.is_clear}
    return {**asdict(one), **told}


def cases_of_engagement(engagement: Engagement) -> list[Case]:
    """Return an outcome for each A/B, target after the change and level of the quality gate.

    An undecided check is skipped, and never failed.
    """
    cases = []
    for entry, added in engagement.of(ComparisonAdded):
        group = f"entry {entry.number}: {added.comparison.b}"
        cases += cases_of_rulings(rule_on_comparison(added.comparison, None), group)
    for _, level in engagement.of(ServiceLevelAdded):
        if level.when == "after":
            cases += [
                Case("service level", one.target, OF_TARGETS.get(one.verdict, "skipped"), one.why)
                for one in level.targets
            ]
    for _, gate in engagement.of(GateAdded):
        for one in gate.subjects.values():
            cases += [
                Case(f"quality gate: {one.subject}", name, OF_LEVELS.get(state, "skipped"), state)
                for name, state in one.states.items()
            ]
    return cases
