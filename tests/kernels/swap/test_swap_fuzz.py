"""Random models with and without a swap, by `benchmarks/swap_fuzz.py`."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kprof.kernels.swap.sites import norms, residuals
from tests.samples import benchmark

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_a_hundred_random_models_compute_what_they_computed():
    script = ROOT / "benchmarks" / "swap_fuzz.py"
    workers = str(min(os.cpu_count() or 1, 4))
    command = [sys.executable, str(script), "100", "--workers", workers]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    told = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert told["failed_seeds"] == []
    assert done.returncode == 0
    assert told["share_swapped"] > 0.6


def test_the_sources_of_models_are_the_same_for_the_same_seed():
    written = benchmark("swap_grammar").written
    assert written(7) == written(7) != written(8)


@pytest.mark.slow
def test_a_norm_that_loses_its_weight_is_found(monkeypatch):
    fuzzed = benchmark("swap_fuzz").fuzzed
    assert fuzzed(37)["failure"] is None
    monkeypatch.setattr(norms, "have_moved", lambda *_: False)
    monkeypatch.setattr(residuals, "have_moved", lambda *_: False)
    failure = fuzzed(37)["failure"]
    assert ("within the swap" in failure, "differs by 0.472" in failure) == (True, True)
