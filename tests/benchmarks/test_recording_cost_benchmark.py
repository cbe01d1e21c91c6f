"""The rows of what recording costs a step, from the times of steps."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("recording_cost_gpu")


TIMES = {"unrecorded": [10.0, 10.0], "torch": [20.0, 20.0], "window": [21.0, 21.0, 28.0]}


def values(rows):
    return {row["name"]: (row["value"], row["met"]) for row in rows}


def test_each_pass_is_compared_with_what_it_is_to_be_compared_with(benchmark):
    found = values(benchmark.rows_of("gpt2", {**TIMES, "light": [10.1, 10.1]}))
    assert found["gpt2-torch"] == (1.0, None)
    assert found["gpt2-window"] == (1.05, True)
    assert found["gpt2-longest"] == (1.333, False)
    assert found["gpt2-light"] == (0.01, True)


def test_without_a_light_pass_there_is_no_row_of_one(benchmark):
    assert "gpt2-light" not in values(benchmark.rows_of("gpt2", {**TIMES, "light": []}))
