"""Sections of the kernel library: the kernels, the fastest of each shape, the quality gate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kprof.kernels.correctness.levels import REJECT, GateReport, Level, Measure
from kprof.report.section import Column, Part, Section, Table, Text
from kprof.report.units import MISSING, format_amount, format_count, format_share, format_time

if TYPE_CHECKING:
    from kprof.kernels.bench.choice import Choice, Timed

# The calls whose time a pass measures.
OF_CALLS = {"forward": "without gradients", "training": "with gradients"}


@dataclass(frozen=True)
class Listed:
    """One kernel of the library, with its providers."""

    name: str
    replaces: str
    providers: tuple[tuple[str, str | None], ...]
    """Name and installed version of each; None: not installed."""
    dtypes: tuple[str, ...]
    has_sites: bool
    """Whether a swap finds places for it in a model."""


@dataclass(frozen=True)
class Unmeasured:
    """A kernel without a stored choice."""

    name: str
    replaces: str
    provider: str | None
    """Who runs its calls after a swap; None: the original."""


def sections_of_unmeasured(kernels: list[Unmeasured]) -> list[Section]:
    """Say who runs the calls of kernels that were not measured, if there are any."""
    if not kernels:
        return []
    columns = (Column("Kernel"), Column("After a swap"), Column("Replaces", "prose"))
    rows = tuple((one.name, one.provider or "the original", one.replaces) for one in kernels)
    lead = Text(
        f"No measurement of {format_count(len(kernels), 'kernel')} is stored here. After a swap "
        "their calls run as listed, until `kprof kernels bench` finds a faster provider."
    )
    table = Table(columns, rows, terminal_rows=len(rows))
    return [Section("Not measured", 1, (lead, table))]


def section_of_kernels(listed: list[Listed]) -> Section:
    """List the kernels with the providers that are installed here."""
    columns = (
        Column("Kernel"),
        Column("Installed providers", "prose"),
        Column("Replaces", "prose"),
        Column("Not installed", "prose", essential=False),
    )
    rows = tuple(
        (
            one.name,
            ", ".join(name for name, version in one.providers if version),
            one.replaces,
            ", ".join(name for name, version in one.providers if not version) or MISSING,
        )
        for one in listed
    )
    parts: list[Text | Table] = [Table(columns, rows, terminal_rows=len(rows))]
    if without := ", ".join(one.name for one in listed if not one.has_sites):
        parts.append(Text(f"Not used by --swap, only by your own code: {without}."))
    return Section("Kernels", 0, tuple(parts))


def section_of_choice(choice: Choice, ranked: list[Timed]) -> Section:
    """Show the times of every provider on one shape in one pass, the chosen one first."""
    shape = "x".join(str(length) for length in ranked[0].shape)
    calls = f"calls {OF_CALLS[choice.direction]}"
    lead = f"Chosen for {calls} on {choice.gpu}: {choice.provider}, {choice.why} ({choice.date})."
    columns = (
        Column("Provider"),
        Column("GPU time", "right"),
        Column("Rate", "right"),
        Column("Of a copy", "right"),
        Column("Host", "right"),
        Column("Not run, because", "prose", essential=False),
    )
    rows = tuple(_row(one) for one in ranked)
    title = f"{choice.kernel} {choice.direction}, {shape} {choice.dtype}"
    caption = "Of a copy: the time of a copy of the same bytes in the same run, over this time."
    if choice.direction == "training":
        caption = f"Forward and backward pass as one. {caption}"
    return Section(title, 0, (Text(lead), Table(columns, rows, caption, terminal_rows=len(rows))))


def _row(one: Timed) -> tuple[str, ...]:
    return (
        one.provider,
        format_time(one.gpu_ns),
        MISSING if one.bytes_per_s is None else format_amount(one.bytes_per_s, "B/s"),
        format_share(one.share_of_copy),
        format_time(one.host_ns),
        one.problem,
    )


TITLE = "Quality gate"
ORDER = 90
CAPTION = (
    "A/A: the same value for the replaced code, against itself or the exact result. "
    "A level that was not run proves nothing."
)


def sections_of_gate(report: GateReport) -> list[Section]:
    """Render the verdict, the matrix of levels, and every measure."""
    parts: list[Part] = [Text(_verdict(report), _tone(report)), _matrix(report)]
    parts += [Text(f"{lv.name}: {lv.why}.", "warning") for lv in report.levels if _is_bad(lv)]
    notes = [f"{level.name}: {note}." for level in report.levels for note in level.notes]
    sections = [Section(f"{TITLE}: {report.subject}", ORDER, tuple(parts))]
    if notes:
        sections.append(Section("Notes", ORDER, tuple(Text(note) for note in notes)))
    measures = [(level, measure) for level in report.levels for measure in level.measures]
    if measures:
        sections.append(Section("Measures", ORDER, (_measures(measures),), in_terminal=False))
    return sections


def _is_bad(level: Level) -> bool:
    return level.state in ("failed", "undecided")


def _verdict(report: GateReport) -> str:
    """Say first whether the check passed, then the class, then the levels that a class needs."""
    by_state: dict[str, list[str]] = {}
    for level in report.levels:
        by_state.setdefault(level.state, []).append(level.name)
    failed, passed = (", ".join(by_state.get(state, [])) for state in ("failed", "passed"))
    if report.reached == REJECT:
        what = f"FAILED, {REJECT}: {failed} failed"
    elif report.passed:
        what = f"PASSED: {passed}" if report.reached is None else f"PASSED, {report.reached}"
    elif failed:
        what = f"FAILED: {failed} failed; {passed or 'no level'} passed"
    else:
        what = f"NOT DECIDED: {passed or 'no level'} passed"
    if report.reached not in (None, REJECT) and not report.passed:
        what = f"{what}, which shows {report.reached}"
    if report.scope is not None and report.reached != REJECT:
        what = f"{what}, for {report.scope}"
    if not report.nearest:
        return f"{what}."
    needs = f"{report.nearest} needs {', '.join(report.missing)} as well"
    is_of_model = set(report.missing) - {"L0", "L1"}
    return f"{what}. The class {needs}{', on the whole model' if is_of_model else ''}."


def _tone(report: GateReport) -> str:
    return "good" if report.passed and report.reached != REJECT else "warning"


def _matrix(report: GateReport) -> Table:
    columns = (
        Column("Level", "name"),
        Column("State"),
        Column("Value", "right"),
        Column("Threshold", "right"),
        Column("A/A", "right"),
        Column("Measured", "prose"),
        Column("Tried", essential=False),
    )
    rows = tuple(_gate_row(level) for level in report.levels if level.name in report.asked)
    return Table(columns, rows, CAPTION, terminal_rows=len(rows))


def _gate_row(level: Level) -> tuple[str, ...]:
    title = f"{level.name} {level.title}"
    worst = level.worst
    if worst is None:
        return (title, level.state, "", "", "", level.why, level.looked_at)
    return (title, level.state, *_numbers(worst), worst.name, level.looked_at)


def _numbers(measure: Measure) -> tuple[str, str, str]:
    sign = "≤" if measure.better == "lower" else "≥"
    return (
        f"{_number(measure.value)} {measure.unit}".rstrip(),
        f"{sign} {_number(measure.threshold)}",
        "" if measure.baseline is None else _number(measure.baseline),
    )


def _measures(measures: list[tuple[Level, Measure]]) -> Table:
    columns = (
        Column("Level"),
        Column("Measure", "name"),
        Column("Met"),
        Column("Value", "right"),
        Column("Threshold", "right"),
        Column("A/A", "right"),
        Column("Worst on", "name"),
    )
    rows = tuple(
        (level.name, m.name, "yes" if m.is_met else "NO", *_numbers(m), m.where)
        for level, m in measures
    )
    return Table(columns, rows, terminal_rows=len(rows))


def _number(value: float) -> str:
    if math.isinf(value):
        return "∞"
    return f"{value:.4g}"
