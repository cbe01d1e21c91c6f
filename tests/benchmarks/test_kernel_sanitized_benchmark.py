"""`benchmarks/kernel_sanitized.py`: what compute-sanitizer found, or why it found nothing."""

import importlib
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from kprof.kernels.bench.sanitize import Sanitized

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    found = importlib.import_module("kernel_sanitized")
    monkeypatch.setattr(found.sanitize, "LONGEST_S", found.sanitize.LONGEST_S)
    return found


def ends(benchmark, monkeypatch, returncode=0, stderr="", late=False):
    """Let the edges end so, without a tool."""

    def run(command, *, timeout, **known):
        if late:
            raise subprocess.TimeoutExpired(command, timeout)
        return SimpleNamespace(returncode=returncode, stderr=stderr)

    monkeypatch.setattr(benchmark.subprocess, "run", run)


def test_each_tool_has_a_row_that_is_met_by_no_finding(benchmark, monkeypatch):
    ends(benchmark, monkeypatch)
    counts = {"memcheck": 0, "racecheck": 2}
    monkeypatch.setattr(
        benchmark.sanitize,
        "sanitize",
        lambda tool, *who, are_forward: Sanitized(tool, counts[tool], ""),
    )
    rows = benchmark.looked_at("rope", "kprof", 1e12)
    assert [(one["name"], one["value"], one["met"]) for one in rows] == [
        ("rope-kprof-memcheck", 0, True),
        ("rope-kprof-racecheck", 2, False),
    ]


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"returncode": 1, "stderr": "RuntimeError: no"}, "RuntimeError: no"),
        ({"late": True}, "without a tool"),
    ],
)
def test_who_does_not_run_alone_is_not_looked_at(benchmark, monkeypatch, how, why):
    ends(benchmark, monkeypatch, **how)
    monkeypatch.setattr(
        benchmark.sanitize, "sanitize", lambda *who, **how: pytest.fail("looked at")
    )
    rows = benchmark.looked_at("rope", "kprof", 1e12)
    told = [(one["value"], one["met"], why in one["what"]) for one in rows]
    assert told == 2 * [(None, None, True)]


def test_without_time_nothing_is_found(benchmark):
    found = benchmark.found_by("memcheck", "rope", "kprof", "", 0.0)
    assert (found.num_errors, "no time" in found.what) == (None, True)
