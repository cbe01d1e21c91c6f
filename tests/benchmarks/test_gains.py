"""The comparison with rivals, and the calls of scripts, of `benchmarks/gains.py`."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gains(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("gains")


def _row(name, a_ms, b_ms=None):
    return {"name": name, "a_ms": a_ms, "b_ms": b_ms}


def test_the_fastest_of_ours_is_compared_with_the_fastest_rival(gains):
    eager, compiled = _row("x", 100.0, 80.0), _row("x_compiled", 60.0, 50.0)

    found = gains.against_rivals("x", [eager, compiled, _row("x_liger", 75.0)])

    assert (found["ours"], found["rival"], found["value"]) == ("x_compiled", "x_compiled", 1.2)


def test_without_a_time_of_a_rival_the_ratio_is_missing(gains):
    found = gains.against_rivals("x", [_row("x", 100.0, 80.0), _row("x_compiled", None)])

    assert found["value"] is None


def test_every_placeholder_of_a_script_is_its_folder_of_data(gains):
    words = [word.format(data="D") for row in gains.ROWS.values() for word in row.script]

    assert [word for word in words if "{" in word] == []
