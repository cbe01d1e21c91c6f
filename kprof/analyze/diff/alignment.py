"""The step's difference between two runs, split by activities that appeared, vanished or changed.

The elapsed time of each run is split as in the report: every instant counts once, for the activity
that owns it (`overlap`), or for the cause of idleness. The split by kind, phase, module, operator
and kernel each adds up to the same difference. Activities match by name, by computation and by
place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import pandas as pd

from kprof.analyze.attribution.overlap import allot_busy_time
from kprof.analyze.attribution.steps import (
    IMBALANCE,
    denominator,
    find_lead,
    find_steps,
    split_steps,
)
from kprof.analyze.groupings import collapse_layers, group_kernels
from kprof.trace import Trace

Fate = Literal["appeared", "vanished", "replaced", "changed", "unchanged", "same"]
# Times that differ by no more than this share of the longer count as unchanged: captures of one
# program differ by more (docs/report.md).
UNCHANGED = 0.01


@dataclass(frozen=True)
class Amount:
    """A part's time in one run: in the whole window, and in a step."""

    calls: int
    """Activities; none are idle time's."""
    time_ns: int
    """Elapsed time in the window."""
    step_ns: int
    """Rounded to whole ns so that the rows of a layout add up to the run's own `step_ns`."""


@dataclass(frozen=True)
class Row:
    """One part of both runs."""

    names: tuple[Names, Names]
    """In the first run and in the second; empty where it has no such part."""
    is_idle: bool
    matched_by: str
    """The common name; empty where only one has it."""
    a: Amount
    b: Amount
    fate: Fate

    @property
    def difference_ns(self) -> int:
        """How much longer it takes in a step of the second run."""
        return self.b.step_ns - self.a.step_ns


@dataclass(frozen=True)
class Side:
    """One of the two runs: the window of all its GPUs, divided by their steps."""

    window_ns: int
    """Where steps are marked, from the host's entry into the first to the end of the last."""
    num_steps: int
    """0 where none is marked: the window of each GPU counts as one then."""
    step_ns: int
    """Elapsed time of a step, rounded to whole ns."""
    num_gpu_steps: int
    """Steps of all GPUs added up, or their windows: what `window_ns` is divided by."""


@dataclass(frozen=True)
class Difference:
    """The second run against the first; the rows of every layout add up to `difference_ns`."""

    a: Side
    b: Side
    layouts: dict[Layout, tuple[Row, ...]]
    """Rows that differ most come first."""

    @property
    def difference_ns(self) -> int:
        """How much longer a step of the second run takes."""
        return self.b.step_ns - self.a.step_ns

    @property
    def is_unchanged(self) -> bool:
        """Whether the steps differ by no more than the tolerance."""
        return _is_unchanged(self.a.step_ns, self.b.step_ns)

    def changes(self, layout: Layout) -> tuple[Row, ...]:
        """Return the rows that differ: in name, in number or in their time in a step."""
        return tuple(row for row in self.layouts[layout] if row.fate not in ("same", "unchanged"))


def find_differences(a: Trace, b: Trace) -> Difference:
    """Lay two analyzed traces side by side; positive differences are time that `b` takes more."""
    sides = (_side(a), _side(b))
    cells_a, cells_b = _cells(a), _cells(b)
    layouts = {layout: _rows(match(layout, cells_a, cells_b), sides) for layout in LAYOUTS}
    return Difference(*sides, layouts)


def apportion(amounts: Sequence[int], divisor: int) -> list[int]:
    """Divide each amount and round it so that the results add up to the rounded total.

    Each is less than one from the exact quotient, and 0 only gives 0. Of equal remainders the
    first are rounded up.
    """
    wholes = [amount // divisor for amount in amounts]
    rests = [amount % divisor for amount in amounts]
    number = (2 * sum(rests) + divisor) // (2 * divisor)
    for i in sorted(range(len(rests)), key=lambda i: -rests[i])[:number]:
        wholes[i] += 1
    return wholes


def _side(trace: Trace) -> Side:
    whole = denominator(trace)
    return Side(whole.time_ns, len(find_steps(trace)), whole.step_ns, whole.num_gpu_steps)


def _rows(matches: list[Match], sides: tuple[Side, Side]) -> tuple[Row, ...]:
    steps_a, steps_b = (side.num_gpu_steps for side in sides)
    of_a, of_b = _amounts(matches, 0, steps_a), _amounts(matches, 1, steps_b)
    rows = []
    for found, a, b in zip(matches, of_a, of_b, strict=True):
        is_as_often = a.calls * steps_b == b.calls * steps_a
        is_as_long = a.time_ns * steps_b == b.time_ns * steps_a
        fate = _fate(found, is_same=is_as_often and is_as_long)
        if fate == "changed" and found.names[0] == found.names[1] and is_as_often:
            fate = "unchanged" if _is_unchanged(a.step_ns, b.step_ns) else fate
        rows.append(Row(found.names, found.is_idle, found.matched_by, a, b, fate))
    return tuple(sorted(rows, key=lambda row: -abs(row.difference_ns)))


def _is_unchanged(a_ns: int, b_ns: int) -> bool:
    return abs(b_ns - a_ns) <= UNCHANGED * max(a_ns, b_ns)


def _fate(found: Match, *, is_same: bool) -> Fate:
    if not found.names[0]:
        return "appeared"
    if not found.names[1]:
        return "vanished"
    if found.matched_by not in KEPT:
        return "replaced"
    return "same" if is_same and found.names[0] == found.names[1] else "changed"


def _amounts(matches: list[Match], which: int, num_steps: int) -> list[Amount]:
    """Add up the cells of every match of one run."""
    cells = [found.cells[which] for found in matches]
    times = [sum(cell.time_ns for cell in mine) for mine in cells]
    calls = [sum(cell.calls for cell in mine) for mine in cells]
    step_ns = apportion(times, num_steps)
    return [Amount(*amount) for amount in zip(calls, times, step_ns, strict=True)]


def _cells(trace: Trace) -> list[Cell]:
    """Split a run's window: what ran by all that is known of it, idle time by phase and cause."""
    kernels, lead = trace.kernels, find_lead(trace)
    keys = ["name", "op", "module", "phase", "kind"]
    modules = collapse_layers(kernels["module"])
    busy = kernels.assign(duration_ns=allot_busy_time(kernels), module=modules)
    groups = group_kernels(busy[~lead.kernels] if lead.kernels.any() else busy, keys)
    ran = [
        Cell(name, op, module, phase, kind, is_idle=False, calls=calls, time_ns=time_ns)
        for name, op, module, phase, kind, calls, time_ns in zip(
            *(_texts(groups[key]) for key in keys),
            groups["calls"].tolist(),
            groups["time_ns"].tolist(),
            strict=True,
        )
    ]
    split = split_steps(trace)
    idle = split[split["is_idle"].to_numpy(bool)]
    for phase, cause, time_ns in zip(
        _texts(idle["phase"]), _texts(idle["part"]), idle["time_ns"].tolist(), strict=True
    ):
        # Nothing is recorded of the time by which other GPUs take longer: a part in every layout.
        name = cause if cause == IMBALANCE else None
        ran.append(Cell(name, name, name, phase, cause, is_idle=True, calls=0, time_ns=time_ns))
    return ran


def _texts(column: pd.Series[str]) -> list[str | None]:
    return [text if isinstance(text, str) else None for text in column.tolist()]


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
    """The cause of idle time."""
    is_idle: bool
    calls: int
    """Activities; none are idle time's."""
    time_ns: int


@dataclass(frozen=True)
class Match:
    """Cells of two runs that are the same part of it, or took each other's place."""

    names: tuple[Names, Names]
    """The name in the first and in the second run; empty where it has none."""
    is_idle: bool
    matched_by: str
    """The common name; empty where only one run has it."""
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
    _join_leftovers(joined, levels)
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


def _join_leftovers(joined: dict[Any, _Both], levels: tuple[_Level, ...]) -> None:
    """Give what one run alone has to the match in which the same name took another's place.

    Nothing is replaced and new at once. Of several such matches it goes to the one in which the
    name has most time.
    """
    name, last = levels[0], len(levels)
    for which in (0, 1):
        homes: dict[Any, list[tuple[int, list[Any], _Both]]] = {}
        for (number, *_), both in joined.items():
            if number == last or levels[number].matched_by in KEPT:
                continue
            for key, cells in _by_key(name, both[which]).items():
                time_ns = sum(cell.time_ns for cell in cells)
                order = sorted(_sortable(_longest_first(name, side)) for side in both)
                homes.setdefault(key, []).append((-time_ns, order, both))
        for place, both in list(joined.items()):
            (key, *others) = _by_key(name, both[which]) or (None,)
            if place[0] == last and not both[1 - which] and not others and key in homes:
                min(homes[key], key=lambda home: home[:2])[2][which].extend(both[which])
                del joined[place]


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
    return _Level("name", lambda cell: (True, cell.name) if cell.is_idle else (False, text(cell)))


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
