"""The folder of an engagement: numbered entries, each a small JSON file that seals the one before.

Entries are only ever added. Each holds the SHA-256 of its own content and of the entry before, so
that a change, a loss or a late insertion shows.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kprof.comparison import with_nan
from kprof.engagement import SCHEMA, AnyContent, Engagement, Entry, Source
from kprof.errors import KprofError

LONGEST_SLUG = 40
SHORTEST_SEAL = 8


def seal(
    engagement: Engagement | None, folder: Path, content: AnyContent, source: Source | None, at: str
) -> Engagement:
    """Return the engagement with one more entry, or a new one with its first; write nothing.

    Raises:
        KprofError: an entry was changed after it was written, or the clock has gone back.
    """
    if engagement is not None and engagement.problems:
        raise KprofError(
            f"{folder}: {engagement.problems[0]}",
            fix="restore the entries as they were, for example from git; see kprof engage status",
        )
    before = engagement.entries if engagement is not None else ()
    if before and at < before[-1].date:
        raise KprofError(
            f"it is {at} here, and the last entry is of {before[-1].date}",
            fix="set this machine's clock, or wait: entries stand in the order of their dates",
        )
    previous = before[-1].digest if before else ""
    plain = _portable(
        msgspec.to_builtins(Entry(len(before) + 1, at, content, previous, "", source))
    )
    entry = _converted({**plain, "digest": _digest_of(plain)})
    return Engagement(folder, (*before, entry))


def write(entry: Entry, folder: Path) -> None:
    """Write an entry that was sealed, where none of its number and name is.

    Raises:
        KprofError: nothing can be written there.
    """
    kind = msgspec.inspect.type_info(type(entry.content)).tag  # type: ignore[attr-defined]
    path = folder / f"{entry.number:04d}-{kind}{_slug(entry.source)}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(entry)) + b"\n")
    except OSError as error:
        problem = f"{path} cannot be written: {error.strerror or error}"
        raise KprofError(problem, fix="free some space, or mend the permissions") from error


def read_engagement(folder: Path, seal: str | None = None) -> Engagement:
    """Read all entries and check that none was changed.

    `seal`: the beginning of a seal that was noted earlier; its entry must still be there.

    Raises:
        KprofError: the folder holds no engagement, or an entry that is none.
    """
    if seal is not None and len(seal) < SHORTEST_SEAL:
        fix = f"give at least {SHORTEST_SEAL} digits, as kprof engage status shows them"
        raise KprofError(f"{seal!r} is too short for a seal", fix=fix)
    paths = sorted(folder.glob("[0-9][0-9][0-9][0-9]-*.json"))
    if not paths:
        raise KprofError(
            f"{folder} holds no engagement", fix=f"begin one: kprof engage init {folder}"
        )
    raw = [_raw(path) for path in paths]
    entries = tuple(_entry(path, content) for path, content in zip(paths, raw, strict=True))
    problems = list(_problems(paths, entries, raw))
    if seal is not None and not any(one.digest.startswith(seal.lower()) for one in entries):
        problems.append(f"No entry has the seal {seal}: entries were removed, or exchanged.")
    return Engagement(folder, entries, tuple(problems))


def _raw(path: Path) -> dict[str, object]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except (OSError, msgspec.MsgspecError) as error:
        raise _damaged(path, error) from error


def _entry(path: Path, raw: dict[str, object]) -> Entry:
    if raw.get("schema") != SCHEMA:
        raise KprofError(
            f"{path.name} is of schema {raw.get('schema')}, and this kprof knows {SCHEMA}",
            fix="use the version of kprof that wrote it, or a newer one",
        )
    try:
        return _converted(raw)
    except msgspec.MsgspecError as error:
        raise _damaged(path, error) from error


def _converted(plain: dict[str, Any]) -> Entry:
    """Return an entry; in the pairs of a comparison what is null was no number."""
    content = plain.get("content")
    if isinstance(content, dict) and isinstance(content.get("comparison"), dict):
        content = {**content, "comparison": with_nan(content["comparison"])}
    return msgspec.convert({**plain, "content": content}, type=Entry)


def _damaged(path: Path, error: Exception) -> KprofError:
    return KprofError(
        f"{path} is no entry of an engagement: {error}",
        fix="restore it, for example from git; entries are not edited by hand",
    )


def _problems(
    paths: list[Path], entries: tuple[Entry, ...], raw: list[dict[str, object]]
) -> Iterator[str]:
    previous = ""
    for place, (path, entry, content) in enumerate(zip(paths, entries, raw, strict=True), 1):
        if _digest_of(content) != entry.digest:
            yield f"{path.name} was changed after it was written."
        if entry.number != place or not path.name.startswith(f"{entry.number:04d}-"):
            yield f"{path.name} is entry {entry.number} and stands in place {place}."
        elif entry.previous != previous:
            yield f"{path.name} does not follow on the entry before it, which was exchanged."
        elif place > 1 and entry.date < entries[place - 2].date:
            yield f"{path.name} is dated before the entry before it."
        previous = entry.digest


def _digest_of(plain: dict[str, object]) -> str:
    """Return the SHA-256 of what is said, however its JSON is laid out."""
    content = {name: value for name, value in plain.items() if name != "digest"}
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()


# Not of an address on the web, and not the slash of a unit.
FOLDERS = re.compile(r"(?<![\w./:])/(?:[^\s/=,:'\"]+/)+")


def without_folders(text: str) -> str:
    """Return text in which an absolute path is but the name at its end."""
    return FOLDERS.sub("", text)


def _portable(value: object) -> dict[str, object]:
    """Return plain data as it is written: of an absolute path the name alone, text in UTF-8."""

    def plain(value: object) -> object:
        if isinstance(value, str):
            return without_folders(value).encode("utf-8", errors="replace").decode()
        if isinstance(value, dict):
            return {plain(name): plain(one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [plain(one) for one in value]
        return value

    # Through JSON once: what is not a number is null there, so the digest is of what can be read.
    return msgspec.json.decode(msgspec.json.encode(plain(value)), type=dict[str, object])


def _slug(source: Source | None) -> str:
    name = re.sub(r"[^A-Za-z0-9]+", "-", source.name if source else "").strip("-").lower()
    return f"-{name[:LONGEST_SLUG]}" if name else ""
