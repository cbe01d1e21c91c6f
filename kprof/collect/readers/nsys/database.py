"""An Nsight Systems export as SQLite: its tables as arrays; absent ones are empty."""

from __future__ import annotations

import os
import sqlite3
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from kprof.collect.readers.kineto.events import MISSING
from kprof.collect.trace_file import content_of, size_of
from kprof.errors import TraceError

MAGIC = b"SQLite format 3\x00"
EXPORT_AGAIN = "export it again: nsys export --type sqlite REPORT.nsys-rep"
# Columns without which a row tells nothing.
VITAL = frozenset({"start", "end", "globalPid", "globalTid"})
# Rows that are Python objects at one time.
BATCH_ROWS = 1 << 16
# Page size, then what the header says of the file's length, and whether that may be believed.
_PAGE_SIZE, _CHANGES, _NUM_PAGES, _VALID_FOR = (16, ">H"), (24, ">I"), (28, ">I"), (92, ">I")

Numbers = NDArray[np.int64]


class Database:
    """The tables of one export; a table or a column may be absent."""

    def __init__(self, connection: sqlite3.Connection, name: str, size_bytes: int) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self.damaged: Counter[str] = Counter()
        """How many rows of each table are left out, since a column that is needed is no number."""
        self._connection = connection
        # Decoded where it is used: of most texts, once for many rows.
        connection.text_factory = bytes
        tables = [
            str(row[0]) for row in self.rows("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        self._columns = {
            table: {str(row[1]) for row in self.rows(f"PRAGMA table_info({_quoted(table)})")}
            for table in tables
        }

    def has(self, table: str, column: str | None = None) -> bool:
        """Whether there is such a table, and such a column in it."""
        columns = self._columns.get(table)
        return columns is not None and (column is None or column in columns)

    def rows(self, query: str) -> Iterator[tuple[object, ...]]:
        """Yield what a query finds; for small tables."""
        for row in self._connection.execute(query).fetchall():
            yield tuple(_decoded(value) for value in row)

    def known(self, table: str, names: Sequence[str]) -> list[tuple[object, ...]]:
        """Return the distinct rows of a small table, in order; None for a column that is absent."""
        if not any(self.has(table, name) for name in names):
            return []
        chosen = ", ".join(_quoted(name) if self.has(table, name) else "NULL" for name in names)
        order = ", ".join(str(place + 1) for place in range(len(names)))
        query = f"SELECT DISTINCT {chosen} FROM {_quoted(table)} ORDER BY {order}"
        return list(self.rows(query))

    def numbers(
        self,
        table: str,
        needed: Sequence[str],
        optional: Sequence[str] = (),
        where: str = "TRUE",
    ) -> dict[str, Numbers]:
        """Return columns of whole numbers; `MISSING` for NULL and for an optional absent one.

        `where` chooses rows, in SQL.
        A table that is absent has no rows. A row with a text where a number is needed is left out
        and counted, and so is all that lies on pages that cannot be read.

        Raises:
            TraceError: a column that is needed is absent.
        """
        names = [*needed, *optional]
        if not self.has(table):
            return {name: np.zeros(0, dtype=np.int64) for name in names}
        self._require(table, needed)
        present = [name for name in names if self.has(table, name)]
        chosen = ", ".join(f"COALESCE({_quoted(name)}, {MISSING})" for name in present)
        query = f"SELECT {chosen} FROM {_quoted(table)} WHERE {where} ORDER BY rowid"
        cursor = self._connection.execute(query)
        parts = [np.zeros((0, len(present)), dtype=np.int64)]
        for batch in self._whole_batches(cursor, table):
            numbers, num_damaged = _as_numbers(batch, [name in VITAL for name in present])
            self.damaged[table] += num_damaged
            parts.append(numbers)
        whole = np.concatenate(parts)
        absent = np.full(len(whole), MISSING, dtype=np.int64)
        found = {name: np.ascontiguousarray(whole[:, i]) for i, name in enumerate(present)}
        return {name: found.get(name, absent) for name in names}

    def batches(self, query: str) -> Iterator[list[tuple[object, ...]]]:
        """Yield what a query finds, many rows at a time; texts as bytes."""
        yield from self._whole_batches(self._connection.execute(query), "NVTX_EVENTS")

    def with_numbers(
        self, table: str, rows: list[tuple[object, ...]], number: int
    ) -> tuple[list[tuple[object, ...]], Numbers]:
        """Return the rows whose first columns are numbers, and those; the others are counted."""
        try:
            return rows, np.array([row[:number] for row in rows], dtype=np.int64)
        except (TypeError, ValueError, OverflowError):
            pass
        found = [[_whole_number(value) for value in row[:number]] for row in rows]
        places = [place for place, row in enumerate(found) if None not in row]
        self.damaged[table] += len(rows) - len(places)
        numbers = np.array([found[place] for place in places], dtype=np.int64)
        return [rows[place] for place in places], numbers.reshape(len(places), number)

    def _whole_batches(
        self, cursor: sqlite3.Cursor, table: str
    ) -> Iterator[list[tuple[object, ...]]]:
        """Yield the rows of a cursor up to those that cannot be read."""
        while True:
            batch, is_damaged = _fetched(cursor)
            self.damaged[table] += is_damaged
            if batch:
                yield batch
            if is_damaged or len(batch) < BATCH_ROWS:
                return

    def texts(self, table: str, column: str) -> dict[int, str]:
        """Return the texts that the ids in a column stand for."""
        if not self.has("StringIds") or not self.has(table, column):
            return {}
        used = f"SELECT DISTINCT {_quoted(column)} FROM {_quoted(table)}"
        query = f"SELECT id, value FROM StringIds WHERE id IN ({used})"
        found = ((_whole_number(number), value) for number, value in self.rows(query))
        return {number: _text(value) for number, value in found if number is not None}

    def pairs(self, table: str, key: str = "name", value: str = "value") -> dict[str, str]:
        """Return two columns of a small table as a mapping; empty where there is no such table."""
        if not (self.has(table, key) and self.has(table, value)):
            return {}
        found = self.rows(f"SELECT {_quoted(key)}, {_quoted(value)} FROM {_quoted(table)}")
        return {_text(k): _text(v) for k, v in found}

    def _require(self, table: str, columns: Sequence[str]) -> None:
        lacking = [name for name in columns if not self.has(table, name)]
        if lacking:
            raise TraceError(
                f"{self.name}: its table {table} has no column {lacking[0]}",
                fix="export it with a newer Nsight Systems: nsys export --type sqlite REPORT",
            )


@contextmanager
def opened(path: Path) -> Iterator[Database]:
    """Open an export, plain or gzipped, for reading alone; nothing is written beside it.

    Raises:
        TraceError: the file is damaged, cut off, or no export of Nsight Systems.
    """
    with content_of(path, is_named=True) as file:
        _require_whole(path, file)
        _require_ended(path)
        address = Path(file.name).absolute().as_uri() + "?mode=ro&immutable=1"
        try:
            with closing(sqlite3.connect(address, uri=True)) as connection:
                yield Database(connection, path.name, size_of(file))
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise TraceError(f"{path.name} is damaged: {error}", fix=EXPORT_AGAIN) from error


def _require_whole(path: Path, file: IO[bytes]) -> None:
    head = os.pread(file.fileno(), 100, 0)
    if not head:
        raise TraceError(f"{path.name} is empty", fix=EXPORT_AGAIN)
    if not head.startswith(MAGIC):
        what = "begins with zeros: its export was interrupted"
        if head.strip(b"\x00"):
            what = f"is no SQLite file; it begins with {head[:16]!r}"
        raise TraceError(f"{path.name} {what}", fix=EXPORT_AGAIN)
    if len(head) < 100:
        raise TraceError(f"{path.name} is cut off within its header", fix=EXPORT_AGAIN)
    page_size, changes, num_pages, valid_for = (
        struct.unpack_from(form, head, offset)[0]
        for offset, form in (_PAGE_SIZE, _CHANGES, _NUM_PAGES, _VALID_FOR)
    )
    expected = num_pages * (65536 if page_size == 1 else page_size)
    if changes == valid_for and size_of(file) < expected:
        raise TraceError(
            f"{path.name} is cut off: it holds {size_of(file):,} of {expected:,} bytes",
            fix=f"copy the file again in full, or {EXPORT_AGAIN}",
        )


def _require_ended(path: Path) -> None:
    if path.with_name(f"{path.name}-journal").exists():
        raise TraceError(
            f"{path.name} is being written, or its export was interrupted: its journal lies beside",
            fix=f"wait until the export has ended, or {EXPORT_AGAIN}",
        )


def _fetched(cursor: sqlite3.Cursor) -> tuple[list[tuple[object, ...]], bool]:
    """Return the next rows, and whether the one behind them is damaged."""
    batch: list[tuple[object, ...]] = []
    try:
        for row in cursor:
            batch.append(row)
            if len(batch) == BATCH_ROWS:
                break
    except (sqlite3.DatabaseError, UnicodeDecodeError):
        return batch, True
    return batch, False


def _as_numbers(batch: list[tuple[object, ...]], is_needed: list[bool]) -> tuple[Numbers, int]:
    """Return rows as numbers, and how many were left out, since a number they need is none."""
    try:
        return np.array(batch, dtype=np.int64), 0
    except (TypeError, ValueError, OverflowError):
        pass
    rows = [[_whole_number(value) for value in row] for row in batch]
    kept = [
        [MISSING if value is None else value for value in row]
        for row in rows
        if not any(value is None and n for value, n in zip(row, is_needed, strict=True))
    ]
    numbers = np.array(kept, dtype=np.int64).reshape(len(kept), len(is_needed))
    return numbers, len(batch) - len(kept)


def _whole_number(value: object) -> int | None:
    """Return a whole number, also one stored as text or as a float; None for anything else."""
    try:
        number = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if -(2**63) <= number < 2**63 else None


def _decoded(value: object) -> object:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _quoted(name: object) -> str:
    return '"' + str(name).replace('"', '""') + '"'
