"""Two runs side by side: what appeared, vanished and changed, adding up to the step's difference.

The elapsed time of each run is split as in the report: every instant counts once, for the activity
that owns it (`overlap`), or for the cause of idleness. The same time is laid out several ways: by
kind, phase, module, operator, kernel. Each layout is whole: its rows add up to the same difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from kprof.analyze.difference.matching import KEPT, LAYOUTS, Cell, Layout, Match, Names, match
from kprof.analyze.evidence import count_steps
from kprof.analyze.overlap import allot_busy_time
from kprof.analyze.steps import find_lead, find_steps
from kprof.analyze.summary import (
    collapse_layers,
    group_kernels,
    measure_capacity,
    split_window,
)
from kprof.trace import Trace

Fate = Literal["appeared", "vanished", "replaced", "changed", "same"]


@dataclass(frozen=True)
class Amount:
    """What one run has of a part: in the whole window, and in a step."""

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
    """What both have in common; empty where only one has it."""
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
    """Without what was launched before the first step, where steps are marked."""
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

    def changes(self, layout: Layout) -> tuple[Row, ...]:
        """Return the rows that differ: in name, in number or in their exact time in a step."""
        return tuple(row for row in self.layouts[layout] if row.fate != "same")


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
    window_ns = measure_capacity(trace.kernels) - find_lead(trace).time_ns
    num_gpu_steps = count_steps(trace)
    step_ns = apportion([window_ns], num_gpu_steps)[0]
    return Side(window_ns, len(find_steps(trace)), step_ns, num_gpu_steps)


def _rows(matches: list[Match], sides: tuple[Side, Side]) -> tuple[Row, ...]:
    steps_a, steps_b = (side.num_gpu_steps for side in sides)
    of_a, of_b = _amounts(matches, 0, steps_a), _amounts(matches, 1, steps_b)
    rows = []
    for found, a, b in zip(matches, of_a, of_b, strict=True):
        is_as_often = a.calls * steps_b == b.calls * steps_a
        is_as_long = a.time_ns * steps_b == b.time_ns * steps_a
        fate = _fate(found, is_same=is_as_often and is_as_long)
        rows.append(Row(found.names, found.is_idle, found.matched_by, a, b, fate))
    return tuple(sorted(rows, key=lambda row: -abs(row.difference_ns)))


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
    split = split_window(trace, lead.kernels, lead.idle)
    idle = split[split["is_idle"].to_numpy(bool)]
    return ran + [
        Cell(None, None, None, phase, cause, is_idle=True, calls=0, time_ns=time_ns)
        for phase, cause, time_ns in zip(
            _texts(idle["phase"]), _texts(idle["part"]), idle["time_ns"].tolist(), strict=True
        )
    ]


def _texts(column: pd.Series[str]) -> list[str | None]:
    return [text if isinstance(text, str) else None for text in column.tolist()]
