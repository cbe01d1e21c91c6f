"""Tables of docs/ that are written from the code are current."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def docs_tables(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("docs_tables")


def test_the_table_of_rules_is_that_of_the_playbooks(docs_tables):
    page = docs_tables.PAGE.read_text()
    assert docs_tables.with_table(page) == page


def test_a_table_that_misses_a_rule_gets_its_row(docs_tables):
    page = docs_tables.PAGE.read_text()
    row = next(line for line in page.splitlines(keepends=True) if line.startswith("| `power_cap`"))
    assert docs_tables.with_table(page.replace(row, "")) == page
