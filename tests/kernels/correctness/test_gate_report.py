"""What a reader sees of the quality gate."""

import json
import re

from kprof.kernels.correctness import GateReport, Level, Measure
from kprof.kernels.correctness.levels import LEVELS, not_run, result_of_gate
from kprof.report.kernel_library import sections_of_gate
from kprof.report.section import Table

# Verdicts, classes and levels.
NAMES = re.compile(r"\b(?:L\d|[A-Z]{2,}(?:-[A-Z]+)?)\b")


def report(*levels):
    found = {level.name: level for level in levels}
    every = tuple(found.get(name, not_run(name, "not asked for")) for name in LEVELS)
    return GateReport("rmsnorm", every, tuple(found))


PASSED = Level("L0", "passed", "every measure keeps to its threshold", looked_at="12 cases")
FAILED = Level(
    "L1",
    "failed",
    "beyond the threshold: output (small)",
    (
        Measure("output", 0.573, 0.00637, 0.00231, where="small"),
        Measure("gradient", 0.001, 0.006, 0.002, where="large"),
    ),
    "72 cases",
)


def matrix(found):
    (table,) = [part for part in sections_of_gate(found)[0].parts if isinstance(part, Table)]
    return {row[0]: row[1:] for row in table.rows}


def test_the_matrix_has_a_row_for_every_level_asked_for_with_its_worst_measure():
    rows = matrix(report(PASSED, FAILED))
    assert list(rows) == ["L0 integrity", "L1 kernel"]
    assert rows["L1 kernel"][:5] == ("failed", "0.573", "≤ 0.00637", "0.00231", "output")


def test_a_level_that_was_not_run_says_so_and_shows_no_number():
    rows = matrix(report(PASSED, not_run("L5", "no task")))
    assert rows["L5 task"][:5] == ("not run", "", "", "", "no task")


def test_the_first_line_is_the_class():
    first = sections_of_gate(report(PASSED, FAILED))[0].parts[0]
    assert first.tone == "warning"
    assert NAMES.findall(first.text) == ["FAILED", "REJECT", "L1", "TASK-EQUIVALENT", "L5"]
    first = sections_of_gate(report(PASSED))[0].parts[0]
    assert NAMES.findall(first.text) == ["PASSED", "L0", "TASK-EQUIVALENT", "L5"]


def test_the_result_is_valid_json_even_where_a_number_is_not_finite():
    endless = Level("L1", "failed", "", (Measure("x", float("inf"), 1.0, None),))
    plain = json.loads(json.dumps(result_of_gate(report(endless)), allow_nan=False))
    assert plain["levels"][1]["measures"][0]["value"] is None
    assert plain["levels"][1]["measures"][0]["is_met"] is False
