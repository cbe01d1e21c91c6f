"""The CSV of Nsight Compute: a column for each metric (raw page), or a row for each (details)."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from kprof.collect.readers.ncu.launches import (
    GPU_NAME,
    Launch,
    Metric,
    find_decimal_mark,
    is_wanted,
    number_in,
)
from kprof.collect.trace_file import content_of
from kprof.errors import TraceError

EXPORT = "ncu --import REPORT.ncu-rep --csv --page raw --print-units base > REPORT.csv"
_FIRST, _NAME, _METRIC, _UNIT, _VALUE = (
    "ID",
    "Kernel Name",
    "Metric Name",
    "Metric Unit",
    "Metric Value",
)
_MARKS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
# A line that Nsight Compute says rather than prints as data.
_SAID = re.compile(r"==(ERROR|WARNING)== *(.*)")
_DIMENSIONS = {
    "grid": ("Grid Size", "launch__grid_dim_"),
    "block": ("Block Size", "launch__block_dim_"),
}

Cells = dict[str, str]


@dataclass(frozen=True)
class Table:
    """Launches in the order of the file, and what else stands in it."""

    launches: tuple[Launch, ...]
    num_other_lines: int
    """Lines after the header that are no rows."""
    said: tuple[str, ...]
    """Warnings and errors of Nsight Compute itself."""


def is_table(head: bytes) -> bool:
    """Tell the CSV of Nsight Compute by its header, which other output may precede."""
    return any(_is_header(row) for row in _rows(_text(head).splitlines()))


def _is_header(row: list[str]) -> bool:
    return row[:1] == [_FIRST] and _NAME in row


def _rows(lines: list[str]) -> Iterator[list[str]]:
    """Yield the cells of each line; a line of something else may hold any quotes."""
    for line in lines:
        yield next(csv.reader([line]), [])


def _text(content: bytes) -> str:
    encoding = _MARKS.get(content[:2], "utf-8-sig")
    return content.decode(encoding, errors="replace")


def read_table(path: Path) -> Table:
    """Read a CSV.

    Raises:
        TraceError: it has no header or no row, is cut off, or its numbers contradict one another.
    """
    with content_of(path) as file:
        text = _text(file.read())
    lines = [line for line in text.splitlines() if line.strip()]
    said = [found for line in lines if (found := _SAID.match(line.strip()))]
    data = [line for line in lines if not line.startswith("==")]
    rows = list(_rows(data))
    start = next((i for i, row in enumerate(rows) if _is_header(row)), None)
    if start is None:
        raise _no_header(path, said)
    header, body = rows[start], [row for row in rows[start + 1 :] if row != rows[start]]
    if body and len(body[-1]) < len(header) and data[-1].startswith('"'):
        raise TraceError(
            f"{path.name} is cut off: its last row holds {len(body[-1])} of {len(header)} cells",
            fix=f"copy the file again in full, or export it again: {EXPORT}",
        )
    whole = [dict(zip(header, row, strict=True)) for row in body if len(row) == len(header)]
    launches = _launches_of_rows if _VALUE in header else _launches_of_columns
    num_other_lines = len(body) - len(whole)
    return Table(tuple(launches(whole, path)), num_other_lines, tuple(one[2] for one in said))


def _no_header(path: Path, said: list[re.Match[str]]) -> TraceError:
    errors = [one[2] for one in said if one[1] == "ERROR"]
    if errors:
        return TraceError(
            f"{path.name} holds no launch; Nsight Compute says: {errors[-1]}",
            fix="see https://developer.nvidia.com/ERR_NVGPUCTRPERM where it is about permission",
        )
    return TraceError(
        f"{path.name} is no CSV of Nsight Compute: no line begins with ID and names kernels",
        fix=f"export the report again: {EXPORT}",
    )


def _launches_of_rows(rows: list[Cells], path: Path) -> Iterator[Launch]:
    """Yield the launches of the details page: a row for each metric, and others for advice."""
    mark = _decimal_mark((row[_VALUE] for row in rows), path)
    by_launch: dict[tuple[str, str], list[Cells]] = {}
    for row in rows:
        by_launch.setdefault((row.get("Process ID", ""), row[_FIRST]), []).append(row)
    for of_launch in by_launch.values():
        metrics: dict[str, Metric] = {}
        for row in of_launch:
            name, number = row[_METRIC], number_in(row[_VALUE], mark)
            if number is not None and is_wanted(name, row[_UNIT]):
                metrics.setdefault(name, Metric(number, row[_UNIT]))
        texts = {row[_METRIC]: row[_VALUE] for row in of_launch}
        yield _launch({**texts, **of_launch[0]}, metrics)


def _decimal_mark(texts: Iterator[str], path: Path) -> str:
    counted = Counter(texts)
    mark = find_decimal_mark(counted)
    if mark is None:
        raise TraceError(
            f"{path.name} writes its numbers in two ways: a comma and a dot both stand before "
            "decimals",
            fix=f"export the report again, in one language: LC_ALL=C {EXPORT}",
        )
    return mark


def _launch(cells: Cells, metrics: dict[str, Metric]) -> Launch:
    return Launch(
        name=cells[_NAME],
        grid=_dimensions(cells, "grid"),
        block=_dimensions(cells, "block"),
        process=_whole(cells.get("Process ID")) or 0,
        device=_whole(cells.get("Device")),
        stream=_whole(cells.get("Stream")),
        gpu=cells.get(GPU_NAME) or None,
        metrics=metrics,
    )


def _dimensions(cells: Cells, what: str) -> str | None:
    """Return a grid or a block as `x,y,z`: written as `(8, 1, 1)`, or in three metrics."""
    column, metric = _DIMENSIONS[what]
    text = cells.get(column) or " ".join(cells.get(f"{metric}{axis}", "") for axis in "xyz")
    numbers = re.findall(r"\d+", text)
    return ",".join(numbers) if len(numbers) == 3 else None


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.strip().isdecimal() else None


def _launches_of_columns(rows: list[Cells], path: Path) -> Iterator[Launch]:
    """Yield the launches of the raw page: a row each, below a row with the units."""
    if not rows:
        return
    units, launches = rows[0], rows[1:]
    names = [name for name in rows[0] if is_wanted(name, units.get(name, ""))]
    mark = _decimal_mark(
        chain.from_iterable([row[name] for name in names] for row in launches), path
    )
    for row in launches:
        numbers = {name: number_in(row[name], mark) for name in names}
        yield _launch(
            row,
            {
                name: Metric(number, units.get(name, ""))
                for name, number in numbers.items()
                if number is not None
            },
        )
