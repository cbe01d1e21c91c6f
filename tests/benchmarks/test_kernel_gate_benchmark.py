"""`benchmarks/kernel_gate.py`: who is judged, and what its rows say."""

import importlib
import subprocess
from pathlib import Path

import pytest

from kprof.errors import KprofError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("kernel_gate")


def level(name, state):
    return {"name": name, "state": state, "why": "so", "looked_at": "", "measures": [], "notes": []}


BOTH = [level("L0", "passed"), level("L1", "failed")]


def test_every_provider_of_ours_is_judged_and_no_other(benchmark):
    judged = benchmark.ours_of(["swiglu", "cross_entropy"])
    assert judged == [
        ("swiglu", "kprof"),
        ("cross_entropy", "kprof"),
        ("cross_entropy", "kprof-shared"),
    ]


def test_what_failed_is_not_met_and_what_did_not_run_has_no_value(benchmark):
    about = {"subject": "rope by kprof", "reached": "REJECT"}
    report = {**about, "levels": [level("L0", "passed"), level("L1", "failed")]}
    found = [(one["name"], one["met"]) for one in benchmark.rows_of("rope", "kprof", report)]
    assert found == [("rope-kprof-L0", True), ("rope-kprof-L1", False)]
    late = benchmark.rows_of("rope", "kprof", None, "it did not end in time")
    assert [(one["value"], one["met"], one["state"]) for one in late] == [
        (None, None, "not run")
    ] * 2


def test_who_has_no_gradients_is_judged_without(benchmark, monkeypatch):
    asked = []

    def run(command, **known):
        asked.append((command[5], command[7], "--forward" in command))
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(benchmark.subprocess, "run", run)
    for one in benchmark.ours_of(["fp8_linear"]):
        benchmark.check(*one, sanitizes=False, ends_s=0.0)
    assert asked == [
        ("fp8_linear", "kprof", False),
        ("fp8_linear", "kprof-wide", True),
        ("fp8_linear", "kprof-tiles", True),
    ]


def test_verdicts_of_the_same_code_are_kept_and_the_others_judged(benchmark):
    rows = [
        *benchmark.rows_of("rope", "kprof", {"subject": "rope", "reached": None, "levels": BOTH}),
        *benchmark.rows_of("adamw", "kprof", None, "it did not end in time"),
    ]
    kept = benchmark.kept_rows({"ran": {}, "rows": rows})
    assert [one["name"] for one in kept] == ["rope-kprof-L0", "rope-kprof-L1"]
    assert benchmark.is_judged("rope", "kprof", kept)
    assert not benchmark.is_judged("adamw", "kprof", kept)


def test_verdicts_of_other_code_are_not_kept(benchmark):
    with pytest.raises(KprofError, match="another code/kprof/kernels/correctness "):
        benchmark.kept_rows({"ran": {"code/kprof/kernels/correctness": "0"}, "rows": []})
