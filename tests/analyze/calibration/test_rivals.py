"""`benchmarks/rivals.py`: other tests on the samples of the self-test."""

import importlib
from pathlib import Path

import numpy as np
import pytest

from kprof.analyze.calibration.error_rates import Rate
from kprof.analyze.calibration.simulate import simulate
from kprof.analyze.verdict.rule import levels_of
from kprof.comparison import Metric, Plan


@pytest.fixture
def rivals(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    return importlib.import_module("rivals")


def test_blocks_err_under_drift_and_abba_under_its_rhythm_where_pairs_do_not(rivals):
    found = rivals.rivals_under_noise(60, 40, 0)
    assert found["drift"]["blocked, Welch"].share > 0.95
    assert found["drift"]["blocked, Mann-Whitney"].share > 0.95
    assert found["independent"]["blocked, Welch"].share < 0.10
    assert found["rhythm"]["ABBA, signed ranks"].share > 0.9
    scenarios = {one.name: one for one in simulate(60, 40, 0, "2026-11-20").scenarios}
    assert found.keys() == scenarios.keys()
    assert scenarios["rhythm"].fixed.false_positive.share < 0.08


def test_the_same_seed_gives_the_other_tests_the_same_rates(rivals):
    again = rivals.rivals_under_noise(30, 12, 0)
    assert again == rivals.rivals_under_noise(30, 12, 0)
    assert again != rivals.rivals_under_noise(30, 12, 1)


def test_a_steady_rise_is_a_difference_to_blocks_and_none_to_abba(rivals):
    rising = np.log(1000.0 + np.arange(80.0))[None, :].repeat(3, axis=0)
    found = rivals.false_positives_of_rivals(rising, levels_of(Plan((Metric("t", "ns"),))))
    assert found["blocked, Welch"] == Rate(3, 3)
    assert found["ABBA, signed ranks"] == Rate(0, 3)
