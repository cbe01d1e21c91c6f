"""The rulings of `kprof gate`, as sections and as outcomes for a CI server."""

from __future__ import annotations

from collections.abc import Sequence

from kprof.analyze.verdict.regressions import Ruling, Verdict
from kprof.report.junit import Case, Outcome
from kprof.report.section import Column, Part, Section, Table, Text

LEADS: dict[Verdict, str] = {
    "PASSED": "PASSED: no regression, and that is proven.",
    "REGRESSION": "REGRESSION: something has become worse, and that is proven.",
    "INCONCLUSIVE": "INCONCLUSIVE: no regression is proven, nor is it proven that there is none.",
}
TONES: dict[Verdict, str] = {"PASSED": "good", "REGRESSION": "warning", "INCONCLUSIVE": "plain"}
OUTCOMES: dict[Verdict, Outcome] = {
    "PASSED": "passed",
    "REGRESSION": "failed",
    "INCONCLUSIVE": "skipped",
}


def sections_of_rulings(verdict: Verdict, rulings: Sequence[Ruling]) -> list[Section]:
    """Render the verdict, every ruling with its reason, and what would settle the open ones."""
    columns = (Column("What", "name"), Column("Verdict"))
    rows = tuple((one.what, one.verdict) for one in rulings)
    parts: list[Part] = [
        Text(LEADS[verdict], TONES[verdict]),
        Table(columns, rows, terminal_rows=len(rows)),
    ]
    parts += [Text(f"{one.what}: {one.why}.") for one in rulings]
    sections = [Section("Gate", 0, tuple(parts))]
    settles = dict.fromkeys(one.settle for one in rulings if one.settle)
    if settles:
        lines = tuple(Text(settle) for settle in settles)
        sections.append(Section("What would settle it", 1, lines))
    return sections


def cases_of_rulings(rulings: Sequence[Ruling], group: str = "kprof gate") -> list[Case]:
    """Return an outcome for each ruling: an inconclusive one is skipped, and never failed."""
    return [
        Case(
            group,
            one.what,
            OUTCOMES[one.verdict],
            f"{one.verdict}: {one.why}" + (f"; to settle it: {one.settle}" if one.settle else ""),
        )
        for one in rulings
    ]
