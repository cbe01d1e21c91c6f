"""`kprof diff`: compare two runs part by part, per step."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kprof.commands import Answer, ShowSecrets, say
from kprof.errors import KprofError
from kprof.report.redaction import secrets_shown

if TYPE_CHECKING:
    from kprof.opened import Progress
    from kprof.report.difference import Compared
    from kprof.trace import Trace

ROWS_ON_PAGE = 60


def diff(
    a: Annotated[
        Path, typer.Argument(metavar="A", help="Before: a run, a trace, or a folder of traces.")
    ],
    b: Annotated[Path, typer.Argument(metavar="B", help="After: the same.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an HTML page as well.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing page.")] = False,
    show_secrets: ShowSecrets = False,
) -> Answer:
    """Compare two runs part by part."""
    from kprof.report.difference import sections_of_difference
    from kprof.report.progress import Progress

    progress = Progress(say, is_patient=True)
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


def diff_runs(a: Path, b: Path, progress: Progress = lambda stage: None) -> Compared:
    """Open two runs or traces and find what differs; nothing is written.

    Raises:
        KprofError: one cannot be read, or the two cannot be compared.
    """
    from kprof.opened import open_trace

    first, second = (open_trace(path, progress) for path in (a, b))
    progress("comparing")
    return diff_traces(first, second)


def diff_traces(first: Trace, second: Trace) -> Compared:
    """Find what differs between two analyzed traces.

    Raises:
        KprofError: they cannot be compared.
    """
    from kprof.analyze.diff.alignment import find_differences
    from kprof.analyze.diff.comparability import find_doubts, find_obstacle
    from kprof.analyze.diff.ranks import compare_ranks
    from kprof.report.difference import Compared

    if obstacle := find_obstacle(first, second):
        raise KprofError(obstacle[0], fix=obstacle[1])
    doubts = tuple(find_doubts(first, second))
    difference = find_differences(first, second)
    return Compared(first, second, difference, doubts, compare_ranks(first, second))


def write_page(compared: Compared, path: Path, *, force: bool) -> None:
    """Write the difference as one offline HTML page."""
    from kprof.report import html
    from kprof.report.difference import sections_of_difference

    sections = sections_of_difference(compared, ROWS_ON_PAGE)
    html.write_page(compared.title, sections, path, force=force)


def json_of(compared: Compared) -> bytes:
    """Return the difference as indented JSON."""
    from kprof.report.difference import result_of_difference

    return msgspec.json.format(msgspec.json.encode(result_of_difference(compared)))
