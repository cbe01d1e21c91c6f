"""The options of `kprof engage`: what to do with which folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Option

from kprof.answer import Answer, say
from kprof.commands import refuse_idle_options
from kprof.errors import KprofError

if TYPE_CHECKING:
    from kprof.engagement import Engagement, Entry
    from kprof.partner import Level

Action = Literal["init", "add", "predict", "decide", "status", "report"]


def engage(
    action: Annotated[Action, typer.Argument(metavar="ACTION", help="What to do.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The engagement's folder.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WHAT", help="init, predict: a name; add: paths; decide: a sentence."
        ),
    ] = None,
    after: Annotated[
        bool, Option("--after", help="add: it was measured after the change [before it].")
    ] = False,
    tests: Annotated[
        str | None, Option(metavar="NAME", help="add: the prediction an A/B tests, or nothing.")
    ] = None,
    gain: Annotated[
        str | None, Option(metavar="LOW,HIGH", help="predict: shares of a step, as 2%,10%.")
    ] = None,
    out: Annotated[
        Path | None, Option(metavar="FILE", help="report: the page [default: DIR/report.html].")
    ] = None,
    template: Annotated[
        str | None, Option(metavar="NAME", help="report: as of kprof report [partner].")
    ] = None,
    redact: Annotated[
        Literal["internal", "partner", "public"] | None,
        Option(help="report: as of kprof report [partner]."),
    ] = None,
    force: Annotated[bool, Option("--force", help="report: replace existing files.")] = False,
    seal: Annotated[
        str | None, Option(metavar="HEX", help="status: a seal that was noted; is it still there?")
    ] = None,
    json: Annotated[bool, Option("--json", help="status: print it as JSON.")] = False,
) -> Answer:
    """Keep one workload's evidence, and score what was predicted.

    add takes runs, comparisons of kprof ab, and what kprof sla, kprof cost and kprof kernels check
    printed with --json. What a run's findings predict is written down when it is added, and scored
    by the A/B that tests it. status exits with 1 if an entry was changed afterwards, or is gone.
    """
    from kprof import engage as verbs
    from kprof.entries import read_engagement
    from kprof.report.engagement import describe, sections_of_engagement
    from kprof.report.engagement_result import json_of_engagement

    given = words or []
    options: dict[str, object] = {
        "after": after,
        "tests": tests,
        "gain": gain,
        "json": json,
        "seal": seal,
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
    found = read_engagement(folder, seal)
    if action == "report":
        return _report(found, out, template or "partner", redact or "partner", force=force)
    if action == "status":
        code = 1 if found.problems else 0
        printed = json_of_engagement(found) if json else None
        last = f"next: kprof engage report {folder}"
        return Answer(found.name, sections_of_engagement(found), printed, last, code)
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
    from kprof.engagement_report import write_report

    page, missing = write_report(found, out, template=template, level=redact, force=force)
    for name in missing:
        say(f"{name} is not beside {found.folder}, or was changed: what only it knows is left out")
    return Answer(found.name, [], None, f"report: {page}, with .md, .json and .xml beside it")


# What each action takes: how many words at most, and which options.
TAKES: dict[Action, tuple[float, set[str]]] = {
    "init": (1, set()),
    "add": (float("inf"), {"--after", "--tests"}),
    "predict": (1, {"--gain"}),
    "decide": (1, set()),
    "status": (0, {"--json", "--seal"}),
    "report": (0, {"--out", "--template", "--redact", "--force"}),
}
