"""The options of `kprof diff`: which two runs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from kprof.answer import Answer
from kprof.commands import ShowSecrets
from kprof.redaction import secrets_shown


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A run, a trace, or a folder of them.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="What to compare with it.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page of HTML as well.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing page.")] = False,
    show_secrets: ShowSecrets = False,
) -> Answer:
    """Lay two runs side by side, part by part."""
    from kprof.diff import diff_runs, json_of, write_page
    from kprof.report.difference import sections_of_difference
    from kprof.report.progress import Progress

    progress = Progress()
    try:
        compared = diff_runs(a, b, progress)
    finally:
        progress.close()
    if out is not None:
        with secrets_shown(shown=show_secrets):
            write_page(compared, out, force=force)
    result, sections = json_of(compared) if json else None, sections_of_difference(compared)
    both = shlex.join([str(a), str(b)])
    last = f"page: {out}" if out else f"as a page: kprof diff {both} --out difference.html"
    return Answer(compared.title, sections, result, last, shows_secrets=show_secrets)
