"""What an engagement measured before the change and after it, side by side; the quality gate."""

from __future__ import annotations

from collections.abc import Callable

from kprof.analyze.engagement import (
    BenchAdded,
    CostAdded,
    Engagement,
    Figure,
    GateAdded,
    Holding,
    RunAdded,
    ServiceLevelAdded,
    TargetJudged,
    When,
)
from kprof.report.partner.evidence import gate_in
from kprof.report.partner.wording import gained, within
from kprof.report.section import Column, Section, Table
from kprof.report.units import MISSING, UNKNOWN, format_time

MOST_DIGITS = 4


def section_of_sides(engagement: Engagement) -> Section | None:
    """Lay the last run, service level and cost before the change beside those after it."""
    rows = [*_step_rows(engagement), *_target_rows(engagement), *_cost_rows(engagement)]
    if not rows:
        return None
    columns = (Column("What", "name"), Column("Before", "right"), Column("After", "right"))
    caption = (
        "Each measured by itself, the newest of either: what changed between them is told by the "
        "comparisons, not by this table."
    )
    return Section(
        "Before and after", 30, (Table(columns, tuple(rows), caption, terminal_rows=40),)
    )


def _newest(engagement: Engagement, kind: type[Holding], when: When) -> Holding | None:
    found = [one for _, one in engagement.of(kind) if getattr(one, "when", None) == when]
    return found[-1] if found else None


def _sides(
    engagement: Engagement, kind: type[Holding], told: Callable[[Holding], dict[str, str]]
) -> list[tuple[str, str, str]]:
    """Return what is told of the newest before and after, by name; a dash where one has none."""
    ends: list[When] = ["before", "after"]
    sides = [told(one) if (one := _newest(engagement, kind, end)) else {} for end in ends]
    names = dict.fromkeys([*sides[0], *sides[1]])
    return [(name, *(side.get(name, MISSING) for side in sides)) for name in names]  # type: ignore[misc]


def _step_rows(engagement: Engagement) -> list[tuple[str, str, str]]:
    def told(run: Holding) -> dict[str, str]:
        assert isinstance(run, RunAdded)
        if run.unrecorded_step_ns is not None:
            return {"step, median": format_time(run.unrecorded_step_ns)}
        return {"step while recorded, median": format_time(run.step_ns)}

    return _sides(engagement, RunAdded, told)


def _target_rows(engagement: Engagement) -> list[tuple[str, str, str]]:
    def told(level: Holding) -> dict[str, str]:
        assert isinstance(level, ServiceLevelAdded)
        return {one.target: f"{one.verdict.lower()}, {_measured(one)}" for one in level.targets}

    return _sides(engagement, ServiceLevelAdded, told)


def _measured(target: TargetJudged) -> str:
    if target.estimate is None or isinstance(target.estimate, str):
        return MISSING if target.estimate is None else "no answer"
    if target.unit == "ns":
        return format_time(target.estimate)
    return f"{target.estimate:.4g} {target.unit}".rstrip()


def _cost_rows(engagement: Engagement) -> list[tuple[str, str, str]]:
    def told(cost: Holding) -> dict[str, str]:
        assert isinstance(cost, CostAdded)
        units = [one.unit for one in cost.figures]
        return {f"{gained(one.name, units)}, {one.unit}": _banded(one) for one in cost.figures}

    return _sides(engagement, CostAdded, told)


def _banded(figure: Figure) -> str:
    low, middle, high = within(figure.low, figure.mid, figure.high, MOST_DIGITS)
    return middle if figure.low == figure.high else f"{middle} ({low} to {high})"


def section_of_gates(engagement: Engagement) -> Section | None:
    """Show which levels of the gate each replacement passed; None: none was checked."""
    found = [gate_in(said) for _, gate in engagement.of(GateAdded) for said in gate.said]
    if not found:
        return None
    columns = (Column("Replacement", "name"), Column("Levels", "name"), Column("Class"))
    rows = tuple(
        (
            one.subject,
            ", ".join(f"{level} {one[level].state}" for level in one.asked),
            one.reached or UNKNOWN,
        )
        for one in found
    )
    return Section("Quality gate", 40, (Table(columns, rows, terminal_rows=len(rows)),))


def section_of_benches(engagement: Engagement) -> Section | None:
    """Show every call beside the best of its peers; None: none was measured."""
    calls = [call for _, bench in engagement.of(BenchAdded) for call in bench.calls]
    if not calls:
        return None
    columns = (
        Column("Kernel alone", "name"),
        Column("Ours", "right"),
        Column("Best other", "right"),
        Column("Which"),
        Column("Ours is", "right"),
    )
    rows = tuple(
        (
            one.what,
            format_time(one.ours.gpu_ns if one.ours else None),
            format_time(one.best_other.gpu_ns if one.best_other else None),
            one.best_other.provider if one.best_other else MISSING,
            MISSING if one.ratio is None else f"{one.ratio:.2f} times as fast",
        )
        for one in calls
    )
    return Section("Beside peers", 42, (Table(columns, rows, terminal_rows=len(rows)),))
