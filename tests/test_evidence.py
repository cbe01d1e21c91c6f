"""`benchmarks/evidence.py`: what a result is called."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H200", "rmsnorm_h200_2026-11.json"),
        ("NVIDIA H100 80GB HBM3", "rmsnorm_h100_2026-11.json"),
        (None, "rmsnorm_h200_2026-11.json"),
    ],
)
def test_a_result_has_the_name_of_the_gpu_that_made_it(monkeypatch, gpu, name):
    monkeypatch.syspath_prepend(BENCHMARKS)
    evidence = importlib.import_module("evidence")
    path = evidence.named_after(gpu, Path("results/rmsnorm_h200_2026-11.json"))
    assert path == Path("results") / name


def test_several_gpus_and_other_results_keep_the_rest_of_their_names(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    evidence = importlib.import_module("evidence")
    called = [Path("roofline_h200x4_2026-11.json"), Path("kept.json")]
    found = [evidence.named_after("NVIDIA H100 80GB HBM3", one).name for one in called]
    assert found == ["roofline_h100x4_2026-11.json", "kept.json"]
