"""Which part of one run became which of another: by name, by what it computes, by its place."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Layout = Literal["part", "phase", "module", "operator", "kernel"]
Names = tuple[str | None, ...]
"""Longest part first; None is the name of what has none."""

# The number in `float16`, `bf16`, `e4m3` or `s8` says what a kernel computes; others say how.
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9])(?:bfloat|float|uint|int|bf|tf|fp|f|s|u|i|e4m|e5m)\d+|(\d+)", re.IGNORECASE
)


class Cell(NamedTuple):
    """Time of one run that no layout divides further."""

    name: str | None
    op: str | None
    module: str | None
    phase: str | None
    kind: str | None
    """Of idle time, its cause."""
    is_idle: bool
    calls: int
    """Activities; none are idle time's."""
    time_ns: int


@dataclass(frozen=True)
class Match:
    """Cells of two runs that are the same part of it, or took each other's place."""

    names: tuple[Names, Names]
    """Of the first and of the second run; empty where it has none."""
    is_idle: bool
    matched_by: str
    """What both have in common; empty where only one run has it."""
    cells: tuple[list[Cell], list[Cell]]


@dataclass(frozen=True)
class _Level:
    """One way to tell that a part of one run is what a part of the other became."""

    matched_by: str
    key: Callable[[Cell], tuple[object, ...] | None]
    """None for a cell that cannot be placed so."""


_Both = tuple[list[Cell], list[Cell]]


def match(layout: Layout, a: list[Cell], b: list[Cell]) -> list[Match]:
    """Match the cells of two runs, in an order that does not depend on which comes first.

    Every cell is in one match. What the same parts became in several places is one match.
    """
    levels = LAYOUTS[layout]
    name = levels[0]
    joined: dict[Any, _Both] = {}
    for number, both in _matched(levels, (a, b)):
        sets = tuple(frozenset(map(name.key, cells)) for cells in both)
        into = joined.setdefault((number, *sets), ([], []))
        into[0].extend(both[0])
        into[1].extend(both[1])
    matches = [
        Match(
            names=(_longest_first(name, both[0]), _longest_first(name, both[1])),
            is_idle=all(cell.is_idle for cell in (*both[0], *both[1])),
            matched_by=levels[number].matched_by if number < len(levels) else "",
            cells=both,
        )
        for (number, *_), both in joined.items()
    ]
    return sorted(matches, key=_canonical)


def without_numbers(name: str) -> str:
    """Return a kernel's name with the numbers that say how, not what, it computes as `*`."""
    return _NUMBER.sub(lambda found: "*" if found[1] else found[0], name)


def without_arguments(name: str) -> str:
    """Return a function's name without numbers, template arguments and parameters.

    A copy's name is none: from where to where it goes stands in parentheses.
    """
    if not name.startswith("void ") and "::" not in name:
        return without_numbers(name)
    depth, kept = 0, []
    for character in name.replace("(anonymous namespace)", "").replace("->", " "):
        depth += character in "<("
        if not depth:
            kept.append(character)
        depth -= character in ">)" and depth > 0
    return without_numbers("".join(kept).removeprefix("void ").strip())


def _matched(levels: tuple[_Level, ...], cells: _Both) -> list[tuple[int, _Both]]:
    """Match cells level by level; what is left stands alone, with the number past the last."""
    matches: list[tuple[int, _Both]] = []
    rest = cells
    for number, level in enumerate(levels):
        of_a, of_b = _by_key(level, rest[0]), _by_key(level, rest[1])
        shared = of_a.keys() & of_b.keys() - {None}
        matches += [(number, (of_a[key], of_b[key])) for key in shared]
        rest = (_without(of_a, shared), _without(of_b, shared))
    last = len(levels)
    matches += [(last, (alone, [])) for alone in _by_key(levels[0], rest[0]).values()]
    return matches + [(last, ([], alone)) for alone in _by_key(levels[0], rest[1]).values()]


def _by_key(level: _Level, cells: list[Cell]) -> dict[Any, list[Cell]]:
    found: dict[Any, list[Cell]] = {}
    for cell in cells:
        found.setdefault(level.key(cell), []).append(cell)
    return found


def _without(cells: dict[Any, list[Cell]], keys: set[Any]) -> list[Cell]:
    return [cell for key, mine in cells.items() if key not in keys for cell in mine]


def _longest_first(name: _Level, cells: list[Cell]) -> Names:
    times: dict[str | None, int] = {}
    for cell in cells:
        *_, text = name.key(cell) or (None,)
        text = text if isinstance(text, str) else None
        times[text] = times.get(text, 0) + cell.time_ns
    return tuple(sorted(times, key=lambda text: (-times[text], text is None, text or "")))


def _canonical(match: Match) -> tuple[object, ...]:
    return (match.matched_by, match.is_idle, *sorted(_sortable(names) for names in match.names))


def _sortable(names: Sequence[str | None]) -> list[tuple[bool, str]]:
    return sorted((name is None, name or "") for name in names)


def _named(text: Callable[[Cell], str | None]) -> _Level:
    """Return the level that matches by name; idle time has none, and is one part."""
    return _Level("name", lambda cell: (True, None) if cell.is_idle else (False, text(cell)))


def _known(matched_by: str, *texts: Callable[[Cell], str | None], num_needed: int = 1) -> _Level:
    """Return a level that matches by several texts, of which the first ones must be known."""

    def key(cell: Cell) -> tuple[object, ...] | None:
        found = tuple(text(cell) for text in texts)
        return None if None in found[:num_needed] else found

    return _Level(matched_by, key)


def _maybe(change: Callable[[str], str], text: str | None) -> str | None:
    return None if text is None else change(text)


NAME, NUMBERS, FUNCTION = "name", "name but for numbers", "function and operator"
PLACE = _known("module, kind and phase", lambda c: c.module, lambda c: c.kind, lambda c: c.phase)
LAYOUTS: dict[Layout, tuple[_Level, ...]] = {
    "part": (_Level(NAME, lambda cell: (cell.is_idle, cell.kind)),),
    "phase": (_Level(NAME, lambda cell: (cell.phase,)),),
    "module": (_named(lambda cell: cell.module),),
    "operator": (
        _named(lambda cell: cell.op),
        _known(NUMBERS, lambda cell: _maybe(without_numbers, cell.op)),
        PLACE,
    ),
    "kernel": (
        _named(lambda cell: cell.name),
        _known(NUMBERS, lambda cell: _maybe(without_numbers, cell.name)),
        _known(FUNCTION, lambda c: _maybe(without_arguments, c.name), lambda c: c.op),
        _known("operator and module", lambda c: c.op, lambda c: c.module, num_needed=2),
        _known(
            "operator and kind, in no module",
            lambda c: c.op if c.module is None else None,
            lambda c: c.kind,
        ),
        PLACE,
    ),
}
"""The levels at which each layout's cells are matched, the surest first."""
KEPT = (NAME, NUMBERS, FUNCTION)
"""Parts matched by these are still the same; by others, one takes the other's place."""
