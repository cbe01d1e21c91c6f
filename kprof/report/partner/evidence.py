"""Evidence: the results that a partner report is made from, read back from saved JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timezone
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from kprof.analyze.calibration.error_rates import Calibration
from kprof.analyze.cost.sheet import Costs
from kprof.analyze.kernel_times import KEYS as BENCH_KEYS
from kprof.analyze.kernel_times import Benched
from kprof.analyze.sla.curves import Curves
from kprof.analyze.sla.evaluate import Assessment
from kprof.analyze.sla.target_verdict import Judgement
from kprof.analyze.sla.targets import parse_target
from kprof.comparison import Comparison, Interval
from kprof.findings import with_ids
from kprof.kernels.correctness.levels import GateReport
from kprof.report.sla_verdict import Judged
from kprof.trace import Caveat, Trace

T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """A file or folder that was read: its name, what it holds, and the SHA-256 of its content."""

    name: str
    what: str
    sha256: str


@dataclass(frozen=True)
class Scored:
    """A gain that was predicted before a change, and what was measured after it.

    The prediction is a share of the step, as is what `measured` leaves of 1.
    """

    finding: str
    low: float
    high: float
    recorded_on: date
    measured: Interval | None = None
    source: str = ""
    """The run that it was predicted of, where that is known."""


@dataclass(frozen=True)
class Decision:
    """A decision, its day and its reason."""

    day: date
    text: str


@dataclass(frozen=True)
class Advice:
    """The plain title of a finding, and its fix in sentences."""

    title: str
    how: tuple[str, ...]


@dataclass(frozen=True)
class Evidence:
    """The evidence on a workload, each kind in the order of time: before first, after last.

    A report uses nothing else, so that the same evidence gives the same bytes.
    """

    title: str
    runs: tuple[Trace, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    """The first is what the report's verdict is about."""
    service_levels: tuple[Judged, ...] = ()
    costs: tuple[Costs, ...] = ()
    gates: tuple[GateReport, ...] = ()
    calibration: Calibration | None = None
    calibration_text: str = ""
    """The calibration as the comparison's own words, where `calibration` itself is missing."""
    predictions: tuple[Scored, ...] = ()
    decisions: tuple[Decision, ...] = ()
    sources: tuple[Source, ...] = ()
    benches: tuple[Benched, ...] = ()
    """Kernels alone beside their peers."""
    advice: Mapping[str, Advice] = field(default_factory=dict)
    """By the name of the rule that found something."""

    @property
    def headline(self) -> Comparison | None:
        """The comparison that the verdict is about."""
        return self.comparisons[0] if self.comparisons else None

    @property
    def day(self) -> date | None:
        """The day of the newest thing in it that has one."""
        days = [_day_of(pair.start_ns) for c in self.comparisons for pair in c.pairs]
        days += [day for run in self.runs if (day := _day_of_run(run)) is not None]
        days += [costs.as_of for costs in self.costs]
        days += [one.day for one in self.decisions]
        return max(days, default=None)


def first_and_last(things: Sequence[T]) -> tuple[T | None, T | None]:
    """Return what was before and what is after; of a single thing no before."""
    return (things[0] if len(things) > 1 else None, things[-1] if things else None)


def _day_of_run(run: Trace) -> date | None:
    """Return when the first activity began; a recorder's base may lie months before."""
    starts = run.kernels["start_ns"] if len(run.kernels) else run.ranges["start_ns"]
    if run.meta.base_time_ns is None or not len(starts):
        return None
    return _day_of(run.meta.base_time_ns + int(starts.min()))


def _day_of(time_ns: int) -> date:
    return datetime.fromtimestamp(time_ns / 1e9, tz=timezone.utc).date()


Plain = Mapping[str, Any]
Kind = Literal[
    "comparison",
    "service level",
    "cost",
    "calibration",
    "quality gate",
    "kernels beside their peers",
]
KEYS: dict[Kind, set[str]] = {
    "comparison": {"plan", "pairs", "claims"},
    "service level": {"percentiles", "targets", "verdict"},
    "cost": {"figures", "as_of", "missing"},
    "calibration": {"scenarios", "num_comparisons"},
    "quality gate": {"subject", "levels", "asked"},
    "kernels beside their peers": {*BENCH_KEYS},
}
"""The keys of each command's JSON; no two kinds share them."""


class Part(NamedTuple):
    """One result in a saved JSON; of kernels a list, one for each."""

    kind: Kind
    said: Any
    arm: str = ""
    """A or B, where it stands in a comparison."""


def parts_of(content: Any) -> list[Part]:  # noqa: ANN401 - any JSON
    """Return the results in the JSON of a command; none where it is of no command.

    The targets and costs of a comparison follow it.
    """
    several = content if isinstance(content, list) else [content]
    kinds = {_kind_of(one) for one in several}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind in ("quality gate", "kernels beside their peers"):
        return [Part(kind, several)]
    if kind is None or isinstance(content, list):
        return []
    levels = content.get("targets") or {} if kind == "comparison" else {}
    parts = [Part(kind, content), *(Part("service level", levels[arm], arm) for arm in levels)]
    if kind == "comparison" and content.get("costs"):
        parts.append(Part("cost", content["costs"], "B"))
    if kind == "comparison" and content.get("gates"):
        parts.append(Part("quality gate", content["gates"]))
    return parts


def _kind_of(content: Any) -> Kind | None:  # noqa: ANN401 - any JSON
    found = content.keys() if isinstance(content, dict) else set()
    return next((kind for kind, keys in KEYS.items() if found >= keys), None)


def service_level_in(content: Plain, source: str = "") -> Judged:
    """Read what `kprof sla --json` printed."""
    judgements = tuple(_judgement(one) for one in content["targets"])
    doubts = tuple(map(Caveat.read, content["doubts"]))
    # JSON of older versions has no curves.
    kept = content.get("curves")
    return Judged(
        source or content["source"],
        Assessment(judgements, doubts, content["gpus"], content.get("spell_s")),
        curves=None if kept is None else msgspec.convert(kept, Curves),
    )


def _judgement(content: Plain) -> Judgement:
    return Judgement(
        parse_target(content["target"]),
        content["verdict"],
        content["why"],
        _time(content["estimate"]),
        _time(content["low"]),
        _time(content["high"]),
        content["samples"],
        content["independent_samples"],
        content["left_out"],
        content["why_left_out"],
        content["samples_needed"],
        tuple(value for v in content["by_run"] if (value := _time(v)) is not None),
        load_s_needed=content.get("load_s_needed"),
    )


def _time(value: object) -> float | None:
    """Read a value; one that is never reached is infinite."""
    if value is None:
        return None
    return math.inf if value == "never" else float(value)  # type: ignore[arg-type]


# Options of earlier versions, and the facts that took their place.
FORMER = {"--kwh-price": "usd_per_kwh in [energy]"}


def costs_in(content: Plain) -> Costs:
    """Read what `kprof cost --json` printed, also with an option of an earlier version."""
    costs = msgspec.convert(content, Costs)
    missing = tuple(
        replace(one, give=tuple(FORMER.get(name, name) for name in one.give))
        for one in costs.missing
    )
    return replace(costs, missing=missing)


def gate_in(content: Plain) -> GateReport:
    """Read a report of the quality gate; a number that was not finite is not known."""
    levels = [
        {**level, "measures": [_measure(one) for one in level["measures"]]}
        for level in content["levels"]
    ]
    return msgspec.convert({**content, "levels": levels}, GateReport, strict=False)


def gates_in(contents: Iterable[Plain]) -> tuple[GateReport, ...]:
    """Read reports of the quality gate; what a whole swap has passed counts for each part of it.

    Training runs are of a swap: their level L6 stands in the reports of its kernels, and in one of
    its own where none of them was checked.
    """
    found = [gate_in(one) for one in contents]
    trainings = [one for one in found if one.asked == ("L6",)]
    checks = [one for one in found if one not in trainings]
    for training in trainings:
        parts = set(kernels_in(training.subject))
        places = [n for n, one in enumerate(checks) if parts & set(kernels_in(one.subject))]
        for place in places:
            checks[place] = checks[place].with_level(training["L6"])
        checks += [] if places else [training]
    return tuple(checks)


def kernels_in(subject: str) -> list[str]:
    """Return the kernels of a swap, as of "rmsnorm=kprof@*.mlp,swiglu", or of a check."""
    return [re.split("[=@ ]", one.strip())[0] for one in subject.split(",")]


def _measure(content: Plain) -> dict[str, Any]:
    known = {name: content[name] for name in ("value", "threshold")}
    return {**content, **{n: math.nan if v is None else v for n, v in known.items()}}


def calibration_in(content: Plain) -> Calibration:
    """Read what `kprof selftest --json` printed, or what it keeps for this machine."""
    return msgspec.convert(with_ids(content, "doubts"), Calibration)
