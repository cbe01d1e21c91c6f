"""docs/coverage.md holds what `benchmarks/swap_coverage.py` writes."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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

    # In a process of its own: other tests have turned Triton's interpreter on.
    ask = (
        "import json, swap_coverage as c; found = c.cells_of(c.sites_of('NAME')); "
        "print(json.dumps([is_replaced for is_replaced, _ in found.values()]))"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", ask.replace("NAME", name)]
    told = subprocess.run(
        command, cwd=ROOT / "benchmarks", env=environment, capture_output=True, check=True
    )

    replaced = [coverage.YES in cell.split(", ") for cell in _rows(coverage.PAGE.read_text())[name]]
    assert replaced == json.loads(told.stdout.splitlines()[-1])


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
