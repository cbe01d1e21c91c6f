"""An engagement as plain data, and as outcomes for a CI server."""

from __future__ import annotations

from dataclasses import asdict

import msgspec

from kprof.analyze.engagement import ComparisonAdded, Engagement, GateAdded, ServiceLevelAdded
from kprof.analyze.findings.scores import Score, Scores, score
from kprof.analyze.verdict.regressions import rule_on_comparison
from kprof.report.junit import Case, Outcome
from kprof.report.regression import cases_of_rulings

SCHEMA = 1
OF_TARGETS: dict[str, Outcome] = {"MET": "passed", "MISSED": "failed"}
OF_LEVELS: dict[str, Outcome] = {"passed": "passed", "failed": "failed"}


def result_of_engagement(engagement: Engagement) -> dict[str, object]:
    """Return all entries and the scores as plain data; unknown as None."""
    return {
        "schema": SCHEMA,
        "name": engagement.name,
        "predictions": _scores(score(engagement)),
        "entries": msgspec.to_builtins(engagement.entries),
    }


def json_of_engagement(engagement: Engagement) -> bytes:
    """Return the same as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(result_of_engagement(engagement)))


def _scores(scores: Scores) -> dict[str, object]:
    return {
        "num_scored": len(scores.scored),
        "num_inside": scores.num_inside if scores.scored else None,
        "num_surely_inside": scores.num_surely_inside if scores.scored else None,
        "mean_absolute_error": scores.mean_absolute_error,
        "mean_error": scores.mean_error,
        "scored": [_score(one) for one in scores.scored],
        "unscored": [asdict(one) for one in scores.unscored],
        "untested": [
            {"entry": one.entry.number, **msgspec.to_builtins(one.predicted)}
            for one in scores.untested
        ],
    }


def _score(one: Score) -> dict[str, object]:
    told = {"error": one.error, "is_inside": one.is_inside, "is_clear": one.is_clear}
    return {**asdict(one), **told}


def cases_of_engagement(engagement: Engagement) -> list[Case]:
    """Return an outcome for each A/B, target after the change and level of the quality gate.

    What nobody can tell is skipped, and never failed.
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
