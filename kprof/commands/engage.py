"""`kprof engage`: one workload's evidence in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer
from typer import Option

from kprof.analyze.engagement import (
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
from kprof.analyze.findings.scores import score
from kprof.commands import Answer, refuse_idle_options, say
from kprof.commands.report import write_partner_report
from kprof.errors import KprofError
from kprof.report.junit import render_junit
from kprof.report.markdown import render_markdown

if TYPE_CHECKING:
    from kprof.report.partner.disclosure import Level
    from kprof.report.partner.evidence import Evidence, Scored, Source

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
        KprofError: a file is there already, or cannot be written.
    """
    from kprof.report.engagement_sections import (
        cases_of_engagement,
        json_of_engagement,
        sections_of_engagement,
    )

    page = out or engagement.folder / "report.html"
    beside = {form: page.with_suffix(form) for form in FORMS}
    taken = [path for path in {page, *beside.values()} if path.exists()]
    if out is not None and taken and not force:
        fix = "name another file with --out, or pass --force"
        raise KprofError(f"{sorted(taken)[0]} exists already", fix=fix)
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
    from kprof.ab.engagement_folder import find_source
    from kprof.opened import open_trace
    from kprof.report.partner.evidence import (
        Decision,
        Evidence,
        calibration_in,
        costs_in,
        gates_in,
        service_level_in,
    )

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
        gates_in(said for _, one in engagement.of(GateAdded) for said in one.said),
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
    """Yield scored predictions, then those without an A/B; answers to questions are left out."""
    from kprof.report.partner.evidence import Scored

    compared = {entry.number: one for entry, one in engagement.of(ComparisonAdded)}
    scores = score(engagement)
    for one in scores.scored:
        added = compared[one.entry]
        bet, interval = added.bet, added.comparison.headline.interval
        assert bet is not None
        made_in = engagement.entry(bet.entry)
        assert made_in is not None
        yield Scored(one.name, *one.predicted, _day_of(made_in), interval, _name_of(made_in))
    for promise in scores.untested:
        shares = promise.predicted.shares
        if shares is not None and promise.predicted.source != "what-if":
            day, source = _day_of(promise.entry), _name_of(promise.entry)
            yield Scored(promise.predicted.name, *shares, day, source=source)


def _sources(engagement: Engagement) -> Iterator[Source]:
    from kprof.report.engagement_sections import describe
    from kprof.report.partner.evidence import Source

    for entry in engagement.entries:
        if entry.source is not None:
            yield Source(entry.source.name, describe(entry), entry.source.sha256)


def _name_of(entry: Entry) -> str:
    return entry.source.name if entry.source is not None else ""


def _day_of(entry: Entry) -> date:
    return date.fromisoformat(entry.date[:10])


Action = Literal["init", "add", "predict", "decide", "status", "report"]


def engage(
    action: Annotated[
        Action,
        typer.Argument(metavar="ACTION", help="init, add, predict, decide, status, report."),
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The engagement's folder.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WHAT", help="init, predict: a name; add: paths; decide: a sentence."
        ),
    ] = None,
    after: Annotated[
        bool, Option("--after", help="add: measured after the change [default: before].")
    ] = False,
    tests: Annotated[
        str | None, Option(metavar="NAME", help="add: prediction that the A/B tests, or nothing.")
    ] = None,
    gain: Annotated[
        str | None,
        Option(metavar="LOW,HIGH", help="predict: saved shares of a step, such as 2%,10%."),
    ] = None,
    out: Annotated[
        Path | None, Option(metavar="FILE", help="report: the page [default: DIR/report.html].")
    ] = None,
    template: Annotated[
        str | None, Option(metavar="NAME", help="report: as for kprof report [default: partner].")
    ] = None,
    redact: Annotated[
        Literal["internal", "partner", "public"] | None,
        Option(metavar="LEVEL", help="report: as for kprof report [default: partner]."),
    ] = None,
    force: Annotated[bool, Option("--force", help="report: replace existing files.")] = False,
    json: Annotated[bool, Option("--json", help="status: print it as JSON.")] = False,
) -> Answer:
    """Keep the evidence of one workload and score its predictions.

    add takes runs, comparisons of kprof ab, and what kprof sla, kprof cost and kprof kernels check
    printed with --json. Adding a run records the predictions of its findings; an A/B that tests
    one scores it.
    """
    from kprof.ab import engagement_folder as verbs
    from kprof.report.engagement_sections import (
        describe,
        json_of_engagement,
        sections_of_engagement,
    )

    given = words or []
    options: dict[str, object] = {
        "after": after,
        "tests": tests,
        "gain": gain,
        "json": json,
    }
    options |= {"out": out, "template": template, "redact": redact, "force": force}
    most, known = TAKES[action]
    refuse_idle_options(action, options, known)
    if len(given) > most:
        fix = "put a sentence in quotes" if most else "leave it out"
        raise KprofError(f"{given[-1]!r} is one word too many for {action}", fix=fix)
    added: list[Entry] = []
    if action == "init":
        verbs.init(folder, *given)
    elif action == "add":
        paths = [Path(word) for word in given]
        added = verbs.add(folder, paths, "after" if after else "before", tests)
    elif action == "predict":
        verbs.predict(folder, " ".join(given), verbs.gain_of(_given(gain)))
    elif action == "decide":
        verbs.decide(folder, " ".join(given))
    found = verbs.read_engagement(folder)
    if action == "report":
        return _report(found, out, template or "partner", redact or "partner", force=force)
    if action == "status":
        printed = json_of_engagement(found) if json else None
        last = f"next: kprof engage report {folder}"
        return Answer(found.name, sections_of_engagement(found), printed, last)
    new = "\n".join(f"entry {one.number}: {describe(one)}" for one in added or found.entries[-1:])
    following = f"add {folder} RUN" if action == "init" else f"status {folder}"
    last = f"{new}; next: kprof engage {following}"
    return Answer(found.name, [], None, last)


def _given(gain: str | None) -> str:
    if gain is None:
        fix = "say the least and the most, as shares of a step: --gain 2%,10%"
        raise KprofError("a prediction needs its gain", fix=fix)
    return gain


def _report(
    found: Engagement, out: Path | None, template: str, redact: Level, *, force: bool
) -> Answer:
    page, missing = write_report(found, out, template=template, level=redact, force=force)
    for name in missing:
        say(f"{name} is not beside {found.folder}, or was changed: its own details are left out")
    return Answer(found.name, [], None, f"report: {page}, with .md, .json and .xml beside it")


# Arguments of each action: the maximum number of words, and its options.
TAKES: dict[Action, tuple[float, set[str]]] = {
    "init": (1, set()),
    "add": (float("inf"), {"--after", "--tests"}),
    "predict": (1, {"--gain"}),
    "decide": (1, set()),
    "status": (0, {"--json"}),
    "report": (0, {"--out", "--template", "--redact", "--force"}),
}
