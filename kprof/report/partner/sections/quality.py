"""The quality gate: whether results stay right when a part is replaced."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kprof.kernels.correctness.levels import REJECT, GateReport, Level
from kprof.report.partner.evidence import Evidence
from kprof.report.partner.parts import Block, Chapter, Missing
from kprof.report.partner.wording import STATES, marked
from kprof.report.section import Column, Table, Text
from kprof.report.units import MISSING

TITLE = "Quality of the results"

HOW = "kprof kernels check NAME --json > gate.json, then name gate.json"
TONES = {"passed": "good", "failed": "warning", "undecided": "plain", "not run": "plain"}
LEVELS = {
    "L0": "L0: it changes nothing else and takes no shortcut",
    "L1": "L1: alone, it is as precise as the code that it replaces",
    "L2": "L2: the layers around it agree",
    "L3": "L3: the model's outputs agree",
    "L4": "L4: the model writes the same text",
    "L5": "L5: the model does its task as well",
    "L6": "L6: training converges the same way",
}
CLASSES = {
    "BIT-EXACT": "the results are the same to the last bit",
    "NUMERICALLY EQUIVALENT": "the results differ by rounding alone",
    "BEHAVIOURALLY EQUIVALENT": "the model behaves the same",
    "TASK-EQUIVALENT": "the model does its task as well",
    "TRAINING-EQUIVALENT": "training converges the same way",
    REJECT: "the results are not good enough",
}


def render(evidence: Evidence) -> Chapter | Missing:
    """Render a verdict and the matrix of levels for everything that was checked."""
    if not evidence.gates:
        return Missing("Whether results stay right with the change", HOW)
    alike: dict[tuple[str, str], list[str]] = {}
    for gate in evidence.gates:
        alike.setdefault((tone_of(gate), _said(gate)), []).append(gate.subject)
    blocks: list[Block] = [
        Text(marked(tone, f"{', '.join(subjects)}: {told}."), tone)
        for (tone, told), subjects in alike.items()
    ]
    blocks.append(_matrix(evidence.gates))
    blocks += [
        Text(f"{gate.subject}, {level.name}: {level.why}.", "warning")
        for gate in evidence.gates
        for level in gate.levels
        if level.state in ("failed", "undecided")
    ]
    return Chapter(TITLE, tuple(blocks))


def tone_of(gate: GateReport) -> str:
    """Return the tone of a report: good only where a class of equivalence was shown."""
    if gate.reached is None:
        return "warning" if _named(gate, "failed") else "plain"
    return "warning" if gate.reached == REJECT else "good"


def _named(gate: GateReport, state: str) -> str:
    return ", ".join(level.name for level in gate.levels if level.state == state)


def _said(gate: GateReport) -> str:
    if gate.reached is not None:
        tried = f", for the calls that were tried: {gate.scope}" if gate.scope else ""
        return CLASSES[gate.reached] + (tried if gate.reached != REJECT else "")
    passed, failed = _named(gate, "passed"), _named(gate, "failed")
    told = f"{passed or 'nothing'} passed" + (f" and {failed} failed" if failed else "")
    missing = f": {', '.join(gate.missing)} must pass as well" if gate.missing else ""
    return f"{told}; this does not prove equivalence yet{missing}"


def _matrix(gates: tuple[GateReport, ...]) -> Table:
    columns = (
        Column("Replacement", "prose"),
        Column("Level", "prose"),
        Column("Result"),
        Column("Value", "right"),
        Column("Allowed", "right"),
        Column("Replaced code", "right"),
        Column("On"),
    )
    rows = tuple(row for gate in gates for row in _rows(gate))
    caption = (
        "Value: the one closest to its limit. Replaced code: the same value of the code before the "
        "change. A level that was not run proves nothing."
    )
    return Table(columns, rows, caption)


def _rows(gate: GateReport) -> Iterator[tuple[str, ...]]:
    """Yield a row for every level that was run, and one for all that were not for one reason."""
    not_run: dict[str, list[str]] = {}
    for level in gate.levels:
        if level.state == "not run":
            not_run.setdefault(level.why, []).append(level.name)
            continue
        state = marked(TONES[level.state], STATES[level.state])
        yield (gate.subject, LEVELS[level.name], state, *_of(level))
    for why, names in not_run.items():
        state = marked(TONES["not run"], STATES["not run"])
        yield (gate.subject, ", ".join(names), state, "", "", "", why)


def _of(level: Level) -> tuple[str, str, str, str]:
    worst = level.worst
    if worst is None:
        return (MISSING, MISSING, MISSING, level.why)
    sign = "≤" if worst.better == "lower" else "≥"
    return (
        f"{_number(worst.value)} {worst.unit}".rstrip(),
        f"{sign} {_number(worst.threshold)}",
        _number(worst.baseline),
        f"{worst.name} {worst.where}".strip(),
    )


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return MISSING
    return "∞" if math.isinf(value) else f"{value:.2g}"
