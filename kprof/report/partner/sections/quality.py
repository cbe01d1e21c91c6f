"""The quality gate: whether results stay right when a part is replaced."""

from __future__ import annotations

import math

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
    "L0": "L0: nothing else is touched, and no shortcut is taken",
    "L1": "L1: the part alone computes as precisely as what it replaces",
    "L2": "L2: the layers around it agree",
    "L3": "L3: the model's outputs agree",
    "L4": "L4: the model writes the same text",
    "L5": "L5: the model does its task as well",
    "L6": "L6: training goes the same way",
}
CLASSES = {
    "BIT-EXACT": "the results are the same to the last bit",
    "NUMERICALLY EQUIVALENT": "the results differ by rounding alone",
    "BEHAVIOURALLY EQUIVALENT": "the model behaves the same",
    "TASK-EQUIVALENT": "the model does its task as well",
    REJECT: "the results are not good enough",
}


def render(evidence: Evidence) -> Chapter | Missing:
    """Render a verdict and the matrix of levels for everything that was checked."""
    if not evidence.gates:
        return Missing("Whether results stay right with the change", HOW)
    blocks: list[Block] = []
    for gate in evidence.gates:
        tone = tone_of(gate)
        blocks.append(Text(marked(tone, f"{gate.subject}: {_said(gate)}."), tone))
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
    missing = f"; to say more, {', '.join(gate.missing)} would have to pass" if gate.missing else ""
    return f"{told}, which is too little to call it equivalent{missing}"


def _matrix(gates: tuple[GateReport, ...]) -> Table:
    columns = (
        Column("What was checked", "prose"),
        Column("Level", "prose"),
        Column("Result"),
        Column("Value", "right"),
        Column("Allowed", "right"),
        Column("Replaced code", "right"),
        Column("On"),
    )
    rows = tuple(
        (
            gate.subject,
            LEVELS[level.name],
            marked(TONES[level.state], STATES[level.state]),
            *_of(level),
        )
        for gate in gates
        for level in gate.levels
    )
    caption = (
        "The value that comes closest to what is allowed. Replaced code: the same number of the "
        "code before. A level that was not run counts as nothing."
    )
    return Table(columns, rows, caption)


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
