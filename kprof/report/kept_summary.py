"""The terminal summary as a run keeps it, so that it is shown again without reading the tables."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kprof.report.redaction import redacted
from kprof.report.section import Bar, Facts, Part, Section, Table, Text, is_in_terminal
from kprof.storage import ALL_RANKS, REPORT_FILE, SUMMARY_FILE, is_saved, own_version

_BYTES_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class _Part:
    """One part of a section, under the name of its kind."""

    text: Text | None = None
    facts: Facts | None = None
    table: Table | None = None
    bar: Bar | None = None


@dataclass(frozen=True)
class _Section:
    title: str
    order: int
    parts: list[_Part]


@dataclass(frozen=True)
class _Kept:
    """Sections, with what they are of: they are shown where both are the same."""

    kprof: str
    checksums: dict[str, int]
    title: str
    sections: list[_Section]


def keep_summary(title: str, sections: Iterable[Section], run: Path, file: Path) -> None:
    """Write what the terminal shows of the complete `run` into `file`."""
    shown = [_without_page(section) for section in sections if section.in_terminal]
    kept = _Kept(own_version(), _checksums(run), title, shown)
    file.write_bytes(msgspec.json.encode(redacted(kept)))


def _without_page(section: Section) -> _Section:
    parts = [part for part in section.parts if is_in_terminal(part)]
    named = [_Part(**{type(part).__name__.lower(): part}) for part in parts]  # type: ignore[arg-type]
    return _Section(section.title, section.order, named)


def kept_summary(run: Path) -> tuple[str, list[Section]] | None:
    """Return title and sections of a saved run, or None: other files, or another kprof's."""
    if not is_saved(run) or not (run / REPORT_FILE).exists():
        return None
    try:
        kept = msgspec.json.decode((run / SUMMARY_FILE).read_bytes(), type=_Kept)
        is_same = kept.kprof == own_version() and kept.checksums == _checksums(run)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return (kept.title, list(map(_section_of, kept.sections))) if is_same else None


def _section_of(kept: _Section) -> Section:
    parts: list[Part] = [
        part
        for one in kept.parts
        for part in (one.text, one.facts, one.table, one.bar)
        if part is not None
    ]
    return Section(kept.title, kept.order, tuple(parts))


def _checksums(run: Path) -> dict[str, int]:
    """Return the CRC of each file that a saved run is read from."""
    found = [*run.glob("*.*"), *(run / ALL_RANKS).glob("*.*")]
    read = [one for one in found if one.suffix in (".json", ".parquet")]
    return {str(one.relative_to(run)): _crc(one) for one in read if one.name != SUMMARY_FILE}


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while some := file.read(_BYTES_AT_ONCE):
            crc = zlib.crc32(some, crc)
    return crc
