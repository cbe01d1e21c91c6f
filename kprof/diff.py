"""`kprof diff`: lay two runs side by side, and say what a step of the second takes more or less."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kprof.analyze.difference.comparability import find_doubts, find_obstacle
from kprof.analyze.difference.lay_out import find_differences
from kprof.errors import KprofError
from kprof.open import Progress, open_trace
from kprof.report import html
from kprof.report.difference import Compared, result_of_difference, sections_of_difference

ROWS_ON_PAGE = 60


def diff_runs(a: Path, b: Path, progress: Progress = lambda stage: None) -> Compared:
    """Open two runs or traces and find what differs; nothing is written.

    Raises:
        KprofError: one cannot be read, or the two cannot be compared.
    """
    first, second = (open_trace(path, progress) for path in (a, b))
    progress("comparing")
    if obstacle := find_obstacle(first, second):
        raise KprofError(obstacle[0], fix=obstacle[1])
    doubts = tuple(find_doubts(first, second))
    return Compared(first, second, find_differences(first, second), doubts)


def write_page(compared: Compared, path: Path, *, force: bool) -> None:
    """Write the difference as one offline HTML page."""
    sections = sections_of_difference(compared, ROWS_ON_PAGE)
    html.write_page(compared.title, sections, path, force=force)


def json_of(compared: Compared) -> bytes:
    """Return the difference as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(result_of_difference(compared)))
