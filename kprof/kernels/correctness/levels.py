"""The result of the gate: measures, levels, the class of equivalence that they reach together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from kprof.kernels.correctness.scope import Scope

State = Literal["passed", "failed", "undecided", "not run"]

SCHEMA = 1
LEVELS = ("L0", "L1", "L2", "L3", "L4", "L5", "L6")
TITLES = {
    "L0": "integrity",
    "L1": "kernel",
    "L2": "layers",
    "L3": "logits",
    "L4": "generation",
    "L5": "task",
    "L6": "training",
}

BIT_EXACT = "BIT-EXACT"
NUMERICAL = "NUMERICALLY EQUIVALENT"
BEHAVIOURAL = "BEHAVIOURALLY EQUIVALENT"
TASK = "TASK-EQUIVALENT"
TRAINING = "TRAINING-EQUIVALENT"
REJECT = "REJECT"

# Strongest first: the levels that a class needs, all of them passed.
NEEDS = {
    BIT_EXACT: ("L0", "L1"),
    NUMERICAL: ("L0", "L1", "L2"),
    BEHAVIOURAL: ("L0", "L3", "L4"),
    TASK: ("L0", "L5"),
    TRAINING: ("L0", "L6"),
}
# What, once run, must have passed: all that is weaker than the class, as the class claims it, too.
VETOES = {
    BIT_EXACT: LEVELS,
    NUMERICAL: LEVELS,
    BEHAVIOURAL: ("L0", "L3", "L4", "L5", "L6"),
    TASK: ("L0", "L5", "L6"),
    TRAINING: ("L0", "L5", "L6"),
}
# All that a swap may reach that changes precision.
OF_LOWER_PRECISION = (TASK, TRAINING)


NUM_NAMED = 3
"""Broken measures that the reason of a failure names."""


@dataclass(frozen=True)
class Measure:
    """One number that a level looked at; `is_met` says on which side of its threshold it lies."""

    name: str
    value: float
    threshold: float
    baseline: float | None
    """The same number of the replaced code against itself, or against the truth."""
    unit: str = ""
    better: Literal["lower", "higher"] = "lower"
    where: str = ""
    """What it was worst on."""

    @property
    def is_met(self) -> bool:
        """Whether the value keeps to the threshold; what is not finite never does."""
        if not (math.isfinite(self.value) and self.has_threshold):
            return False
        if self.better == "lower":
            return self.value <= self.threshold
        return self.value >= self.threshold

    @property
    def has_threshold(self) -> bool:
        """Whether there is anything to keep to: what the replaced code does itself is finite."""
        return math.isfinite(self.threshold)

    def __str__(self) -> str:
        if self.unit == "faults":
            return self.where
        sign = "≤" if self.better == "lower" else "≥"
        where = f" ({self.where})" if self.where else ""
        return f"{self.name} is {self.value:.4g}, not {sign} {self.threshold:.4g}{where}"

    @property
    def strain(self) -> float:
        """How much of the threshold is used up: above 1 it is broken."""
        low, high = self.value, self.threshold
        if self.better == "higher":
            low, high = high, low
        if not (math.isfinite(low) and math.isfinite(high)):
            return math.inf
        if high <= 0:
            return 0.0 if low <= high else math.inf
        return low / high


@dataclass(frozen=True)
class Level:
    """What one level found."""

    name: str
    state: State
    why: str
    """A sentence: what decided, or what was missing."""
    measures: tuple[Measure, ...] = ()
    looked_at: str = ""
    """How much was looked at, in words."""
    is_bit_exact: bool = False
    """Of L1: every result had the bits of the replaced code's."""
    notes: tuple[str, ...] = ()
    """What was seen, but is not held against the replacement; what could not be looked at."""
    scope: Scope | None = None
    """Of L1: the calls that were tried."""

    @property
    def title(self) -> str:
        """The level's name in words."""
        return TITLES[self.name]

    @property
    def worst(self) -> Measure | None:
        """The measure that comes closest to its threshold, or breaks it most."""
        return max(self.measures, key=lambda measure: measure.strain, default=None)


def judge(
    name: str,
    measures: Iterable[Measure],
    looked_at: str,
    *,
    notes: Sequence[str] = (),
    is_bit_exact: bool = False,
) -> Level:
    """Return the level that passes when every measure keeps to its threshold.

    Where none is broken and one has no threshold, nothing was judged: it counts as not run.
    """
    measures = tuple(measures)
    open_ones = [m for m in measures if not m.has_threshold]
    broken = [m for m in measures if m.has_threshold and not m.is_met]
    broken.sort(key=lambda m: m.strain, reverse=True)
    if open_ones and not broken:
        why = f"{open_ones[0].name} has no threshold, as what it follows from is not finite"
        return Level(name, "not run", why, measures, looked_at, notes=tuple(notes))
    why = "every measure keeps to its threshold"
    if broken:
        more = f"; and {len(broken) - NUM_NAMED} more" if len(broken) > NUM_NAMED else ""
        why = "; ".join(str(measure) for measure in broken[:NUM_NAMED]) + more
    state: State = "failed" if broken else "passed"
    return Level(name, state, why, measures, looked_at, is_bit_exact, tuple(notes))


def not_run(name: str, why: str) -> Level:
    """Return the level as one that was not run, which is never as good as passed."""
    return Level(name, "not run", why)


def unjudged(name: str, new: Iterable[float], own: Iterable[float], places: str) -> Level | None:
    """Return the level where a distance is not finite, of which no threshold follows; else None.

    `new` and `own` (A/A) are distances from the replaced code, place by place. The new code fails
    by what is not finite in it alone; where A/A is not, there is nothing to hold it against.
    """
    is_finite = [(math.isfinite(a), math.isfinite(b)) for a, b in zip(new, own, strict=True)]
    alone = [not new and own for new, own in is_finite]
    if any(alone):
        title = f"{places} that are not finite in the new code alone"
        found = Measure(title, sum(alone), 0, 0, where=f"the first is {alone.index(True)}")
        return judge(name, (found,), f"{len(is_finite):,} {places}")
    num_open = sum(not own for _, own in is_finite)
    if num_open:
        where = f"at {num_open:,} of {len(is_finite):,} {places}"
        return not_run(name, f"the replaced code's own is not finite {where}: no threshold follows")
    return None


@dataclass(frozen=True)
class GateReport:
    """All levels of one check."""

    subject: str
    levels: tuple[Level, ...]
    asked: tuple[str, ...]
    """The levels that were asked for."""
    changes_precision: bool = False
    is_gpu_broken: bool = False
    """Nothing runs on the GPU any more in the process that checked."""

    def __getitem__(self, name: str) -> Level:
        """Return the level with this name, such as `report["L1"]`."""
        return next(level for level in self.levels if level.name == name)

    def with_level(self, level: Level) -> GateReport:
        """Return the report with a level that was run apart; one that it has run itself stays."""
        levels = (
            level if one.name == level.name and one.state == "not run" else one
            for one in self.levels
        )
        return replace(self, levels=tuple(levels))

    @property
    def scope(self) -> Scope | None:
        """The calls that the class speaks of: those that L1 tried; None where it was not run."""
        return next((level.scope for level in self.levels if level.scope), None)

    @property
    def passed(self) -> bool:
        """Whether every level that was asked for was run and passed."""
        return bool(self.asked) and all(self[name].state == "passed" for name in self.asked)

    @property
    def reached(self) -> str | None:
        """The strongest class that was shown; REJECT, or None where too little was run to say.

        A level that failed rejects, unless levels that do not need it show a weaker class. One that
        is undecided keeps back every class that claims it, and rejects nothing: where only such
        levels are missing for a class, the class is unknown.
        """
        open_ones = [name for name in NEEDS if self._is_open(name)]
        for name in open_ones:
            if not self._missing(name):
                return name
        undecided = self._in_state("undecided")
        can_tell = all(set(self._missing(name)) - undecided for name in open_ones)
        return REJECT if self._in_state("failed") and can_tell else None

    @property
    def nearest(self) -> str | None:
        """The class beyond what was reached of which the fewest levels are missing."""
        names = list(NEEDS)
        stronger = names[: names.index(self.reached)] if self.reached in NEEDS else names
        open_ones = [name for name in stronger if self._is_open(name)]
        return min(open_ones, key=lambda name: len(self._missing(name)), default=None)

    def _in_state(self, state: State) -> set[str]:
        return {level.name for level in self.levels if level.state == state}

    def _is_open(self, name: str) -> bool:
        """Whether nothing that was found forbids the class."""
        if self._in_state("failed") & set(VETOES[name]):
            return False
        if name == BIT_EXACT and not self["L1"].is_bit_exact:
            return False
        return not self.changes_precision or name in OF_LOWER_PRECISION

    @property
    def missing(self) -> tuple[str, ...]:
        """The levels that the nearest class still needs."""
        return self._missing(self.nearest) if self.nearest else ()

    def _missing(self, name: str) -> tuple[str, ...]:
        passed, undecided = self._in_state("passed"), self._in_state("undecided")
        wanted = set(NEEDS[name]) - passed | set(VETOES[name]) & undecided
        return tuple(level for level in LEVELS if level in wanted)


def result_of_gate(report: GateReport) -> dict[str, object]:
    """Return the report as plain data; a number that is not finite is None."""
    return {
        "schema": SCHEMA,
        "subject": report.subject,
        "passed": report.passed,
        "reached": report.reached,
        "missing": list(report.missing),
        "asked": list(report.asked),
        "changes_precision": report.changes_precision,
        "scope": None if report.scope is None else _scope(report.scope),
        "levels": [_level(level) for level in report.levels],
    }


def _scope(scope: Scope) -> dict[str, object]:
    return {"words": str(scope), **asdict(scope)}


def _level(level: Level) -> dict[str, object]:
    return {
        "name": level.name,
        "title": level.title,
        "state": level.state,
        "why": level.why,
        "looked_at": level.looked_at,
        "is_bit_exact": level.is_bit_exact,
        "scope": None if level.scope is None else _scope(level.scope),
        "notes": list(level.notes),
        "measures": [_measure(measure) for measure in level.measures],
    }


def _measure(measure: Measure) -> dict[str, object]:
    plain = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(measure).items()
    }
    return plain | {"is_met": measure.is_met}
