"""The report of an engagement: the page for its partner, and what machines read beside it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import TypeVar

from kprof.analyze.score import score
from kprof.engagement import (
    BenchAdded,
    CalibrationAdded,
    ComparisonAdded,
    CostAdded,
    Decided,
    Engagement,
    Entry,
    GateAdded,
    RunAdded,
    ServiceLevelAdded,
)
from kprof.errors import KprofError
from kprof.open import open_trace
from kprof.partner import Decision, Evidence, Level, Scored, Source, write_partner_report
from kprof.report.engagement import describe, sections_of_engagement
from kprof.report.engagement_result import cases_of_engagement, json_of_engagement
from kprof.report.junit import render_junit
from kprof.report.markdown import render_markdown
from kprof.report.partner.saved_answers import (
    calibration_in,
    costs_in,
    gate_in,
    service_level_in,
)
from kprof.summarise import find_source

Measured = TypeVar("Measured", RunAdded, ServiceLevelAdded, CostAdded)

FORMS = (".html", ".json", ".md", ".xml")


def write_report(
    engagement: Engagement,
    out: Path | None = None,
    *,
    template: str = "partner",
    level: Level = "partner",
    force: bool = False,
) -> tuple[Path, tuple[str, ...]]:
    """Write the page, and beside it JSON, Markdown and JUnit XML.

    Return where the page is, and the names of runs that are not at hand, or were changed: what
    only they know is not on the page. Reports in the engagement's own folder are replaced.

    Raises:
        KprofError: a file is there already, or cannot be written; an entry was changed.
    """
    page = out or engagement.folder / "report.html"
    beside = {form: page.with_suffix(form) for form in FORMS}
    taken = [path for path in {page, *beside.values()} if path.exists()]
    if out is not None and taken and not force:
        fix = "name another file with --out, or pass --force"
        raise KprofError(f"{sorted(taken)[0]} exists already", fix=fix)
    if engagement.problems:
        fix = "restore the entries as they were, for example from git"
        raise KprofError(engagement.problems[0], fix=fix)
    evidence, missing = evidence_of(engagement)
    write_partner_report(evidence, page, template, level)
    sections = sections_of_engagement(engagement)
    suite, title = f"Engagement {engagement.name}", f"Engagement: {engagement.name}"
    try:
        beside[".json"].write_bytes(json_of_engagement(engagement) + b"\n")
        beside[".md"].write_text(render_markdown(title, sections), encoding="utf-8")
        beside[".xml"].write_bytes(render_junit(suite, cases_of_engagement(engagement)))
    except OSError as error:
        problem = f"{error.filename} cannot be written: {error.strerror or error}"
        raise KprofError(problem, fix="name another file with --out") from error
    return page, missing


def evidence_of(engagement: Engagement) -> tuple[Evidence, tuple[str, ...]]:
    """Return what the page shows, and the names of the runs that it has to do without.

    Of each kind what was before the change comes before what was after it; of comparisons the
    newest comes first, because the verdict is about that.
    """
    runs, missing = [], []
    for entry, _ in _in_order(engagement, RunAdded):
        path = find_source(entry.source, engagement.folder) if entry.source else None
        if path is not None:
            runs.append(open_trace(path))
        elif entry.source:
            missing.append(entry.source.name)
    compared = [one for _, one in reversed(engagement.of(ComparisonAdded))]
    calibrations = [calibration_in(one.said) for _, one in engagement.of(CalibrationAdded)]
    levels = [service_level_in(one.said) for _, one in _in_order(engagement, ServiceLevelAdded)]
    evidence = Evidence(
        engagement.name,
        tuple(runs),
        tuple(one.comparison for one in compared),
        tuple(levels),
        tuple(costs_in(one.said) for _, one in _in_order(engagement, CostAdded)),
        tuple(gate_in(said) for _, one in engagement.of(GateAdded) for said in one.said),
        calibrations[-1] if calibrations else None,
        compared[0].calibration if compared else "",
        tuple(_predictions(engagement)),
        tuple(Decision(_day_of(entry), one.text) for entry, one in engagement.of(Decided)),
        tuple(_sources(engagement)),
        tuple(call for _, one in engagement.of(BenchAdded) for call in one.calls),
    )
    return evidence, tuple(missing)


def _in_order(engagement: Engagement, kind: type[Measured]) -> list[tuple[Entry, Measured]]:
    """Return the entries of one kind, those from before the change first."""
    return sorted(engagement.of(kind), key=lambda found: found[1].when == "after")


def _predictions(engagement: Engagement) -> Iterator[Scored]:
    """Yield what was scored, and what no A/B tests yet; answers to questions are no promises."""
    compared = {entry.number: one for entry, one in engagement.of(ComparisonAdded)}
    scores = score(engagement)
    for one in scores.scored:
        added = compared[one.entry]
        bet, interval = added.bet, added.comparison.headline.interval
        assert bet is not None
        made_in = engagement.entries[bet.entry - 1]
        yield Scored(one.name, *one.predicted, _day_of(made_in), interval, _name_of(made_in))
    for promise in scores.untested:
        shares = promise.predicted.shares
        if shares is not None and promise.predicted.source != "what-if":
            day, source = _day_of(promise.entry), _name_of(promise.entry)
            yield Scored(promise.predicted.name, *shares, day, source=source)


def _sources(engagement: Engagement) -> Iterator[Source]:
    for entry in engagement.entries:
        if entry.source is not None:
            yield Source(entry.source.name, describe(entry), entry.source.sha256)
    number = len(engagement.entries)
    yield Source(engagement.name, f"engagement up to entry {number}: its seal", engagement.seal)


def _name_of(entry: Entry) -> str:
    return entry.source.name if entry.source is not None else ""


def _day_of(entry: Entry) -> date:
    return date.fromisoformat(entry.date[:10])
