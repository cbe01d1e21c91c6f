"""docs/coverage.md holds what `benchmarks/swap_coverage.py` writes."""

import importlib
from pathlib import Path

import pytest

from tests.kernels.kernel_checks import INTERPRETED, quiet_numpy  # noqa: F401

pytestmark = INTERPRETED
ROOT = Path(__file__).parents[2]


@pytest.fixture
def coverage(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("swap_coverage")


def _rows(page):
    """Return the first cell of each row of the table, and the others."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {one[0]: one[1:] for one in cells}


def test_the_page_has_a_row_for_every_architecture(coverage):
    header, *names = _rows(coverage.PAGE.read_text())

    assert header == "architecture"
    assert names == [*coverage.ARCHITECTURES]
    assert len(names) >= 32


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "bert", "mixtral"])
def test_a_row_is_what_a_swap_does_today(coverage, name):
    pytest.importorskip("transformers")

    cells = coverage.cells_of(coverage.sites_of(name))

    replaced = [coverage.YES in cell.split(", ") for cell in _rows(coverage.PAGE.read_text())[name]]
    assert replaced == [is_replaced for is_replaced, _ in cells.values()]


def test_calls_without_a_gpu_count_as_replaced_and_others_give_their_reason(coverage):
    from kprof.kernels.swap.providers import NEEDS_GPU
    from kprof.kernels.swap.swap_report import Calls, SiteReport

    sites = [
        SiteReport("a", "rope", "A", None, (Calls(1, None, NEEDS_GPU), Calls(1, None, "odd"))),
        SiteReport("b", "rmsnorm", "B", "skipped"),
    ]

    cells = coverage.cells_of(sites)

    assert cells["rotation"] == (True, ["odd"])
    assert cells["norms"] == (False, ["skipped"])
