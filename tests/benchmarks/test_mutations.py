"""Faults are planted where a test runs, and say what they change."""

import ast
import json
import subprocess
import sys
from textwrap import dedent

import pytest

from tests.samples import benchmark

SOURCE = dedent('''
    """About widths."""
    from __future__ import annotations

    def width(low: int, high: int) -> int:
        """Return the width."""
        if low > high:
            raise ValueError(f"{low + 1} is too large")
        found = high - low + 1
        note(found, strict=True)
        return max(found, 2)

    def said(width) -> str:
        return f"{width + 1}" if width > 1 else "one"
''')


@pytest.fixture
def planted():
    """Return the faults of the source above, as operator, what stood there and what stands now."""
    mutations = benchmark("mutations")
    tree = ast.parse(SOURCE)
    probes, _ = mutations.probe_blocks(tree, 0)
    search = mutations.Search("kprof/ab/width.py", SOURCE, probes)
    for statement in tree.body:
        search.visit(statement)
    return search.found


def test_each_operator_changes_one_place(planted):
    assert sorted((one.operator, one.before, one.after) for one in planted) == [
        ("+, -", "high - low", "(high + low)"),
        ("+, -", "high - low + 1", "(high - low - 1)"),
        ("comparison", "low > high", "(low <= high)"),
        ("min, max", "max", "min"),
        ("off by one", "1", "(2)"),
        ("off by one", "2", "(3)"),
        ("off by one", "low > high", "(low >= high)"),
        ("removed statement", "note(found, strict=True)", "pass"),
        ("returned value", "max(found, 2)", "None"),
    ]


def test_a_fault_leaves_all_else_as_it_was(planted):
    (fault,) = [one for one in planted if one.operator == "comparison"]
    text = SOURCE.encode()
    changed = text[: fault.start] + fault.after.encode() + text[fault.end :]
    assert changed.decode() == SOURCE.replace("low > high", "(low <= high)")


def test_a_statement_behind_a_branch_has_a_probe_of_its_own(planted):
    probes = {one.before: one.probe for one in planted}
    assert probes["low > high"] != probes["note(found, strict=True)"] == probes["max(found, 2)"]


def test_probed_code_notes_the_blocks_that_ran(tmp_path):
    mutations = benchmark("mutations")
    tree = ast.parse(SOURCE.replace("note(found, strict=True)", "pass"))
    mutations.probe_blocks(tree, 0)
    package = tmp_path / "kprof"
    package.mkdir()
    (package / "_probes.py").write_text(mutations.PROBES)
    (package / "__init__.py").write_text("")
    (package / "width.py").write_text(mutations.with_probes(tree))
    code = "from kprof.width import width; width(1, 3)"
    environment = {"PYTHONPATH": str(tmp_path), "KPROF_PROBES": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
    (noted,) = tmp_path.glob("child-*")
    assert json.loads(noted.read_text()) == [1, 2]


def test_the_same_seed_draws_the_same_faults(planted):
    mutations = benchmark("mutations")
    first, again = (list(mutations.draw(planted, 5)) for _ in range(2))
    assert first == again
    assert sorted(first, key=repr) == sorted(planted, key=repr)
    assert first != list(mutations.draw(planted, 6))
