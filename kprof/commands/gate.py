"""The options of `kprof gate`: what to hold against what."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from kprof.answer import Answer

INCONCLUSIVE = 3


def gate(
    candidate: Annotated[
        Path, typer.Argument(metavar="CANDIDATE", help="A comparison, a run, or a result as JSON.")
    ],
    against: Annotated[
        Path | None,
        Option(metavar="BASELINE", help="One of the same kind [of a comparison: its A]."),
    ] = None,
    smallest_effect: Annotated[
        str | None, Option(metavar="SHARE", help="Least difference that matters [the A/B's].")
    ] = None,
    strict: Annotated[bool, Option("--strict", help="Exit with 3 where nobody can tell.")] = False,
    junit: Annotated[Path | None, Option(metavar="FILE", help="Write JUnit XML as well.")] = None,
    markdown: Annotated[Path | None, Option(metavar="FILE", help="Write Markdown as well.")] = None,
    json: Annotated[bool, Option("--json", help="Print the rulings as JSON.")] = False,
    force: Annotated[bool, Option("--force", help="Replace existing files.")] = False,
) -> Answer:
    """Fail a CI job where something became worse, and that is proven.

    Takes comparisons of kprof ab, runs, or what kprof sla and kprof kernels check printed with
    --json. Exit code: 1 a regression is proven; 0 none is, INCONCLUSIVE included, unless --strict;
    2 usage.
    """
    from kprof.regression import hold_against, write_beside
    from kprof.variants import share_of

    effect = share_of(smallest_effect) if smallest_effect else None
    ruled = hold_against(candidate, against, effect)
    write_beside(ruled, junit, markdown, force=force)
    code = 1 if ruled.verdict == "REGRESSION" else 0
    if strict and ruled.verdict == "INCONCLUSIVE":
        code = INCONCLUSIVE
    last = f"{ruled.verdict}: exit code {code}"
    return Answer(ruled.title, ruled.sections, ruled.json if json else None, last, code)
