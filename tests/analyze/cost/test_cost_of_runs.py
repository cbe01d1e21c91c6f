"""What a recorded run knows of its cost, and what it does not."""

import json
from pathlib import Path

import pytest

from kprof.analyze.cost.of_runs import measured_in
from kprof.trace import Gpu, Recording
from tests.cost_answers import answer, figures, mid, refusal
from tests.kineto_files import annotation, kernel, launch, operator, write
from tests.traces import analyzed_trace_of

H200_TRAIN = Path(__file__).parents[2] / "data" / "h200" / "llama_train.json.gz"


def test_a_run_that_knows_nothing_says_why(capsys, tmp_path):
    path = tmp_path / "host.json"
    operator = {
        "ph": "X",
        "cat": "cpu_op",
        "name": "aten::mm",
        "pid": 1,
        "tid": 1,
        "ts": 1,
        "dur": 5,
    }
    path.write_text(json.dumps({"traceEvents": [operator]}))
    told = refusal(capsys, path)
    assert ("host.json" in told, "no GPU" in told) == (True, True)


def test_a_run_gives_its_gpus_and_step_and_the_line_gives_the_tokens(capsys):
    result = answer(capsys, H200_TRAIN, "--tokens-per-step", "8192")
    assert result["price"]["name"] == "H200, on-demand"
    price = result["price"]["usd_per_gpu_hour"]["mid"]
    thousand = mid(result, "Steps", "a thousand steps", "$")
    assert thousand == pytest.approx(price * 40.3 / 3600, rel=0.005)
    paid = mid(result, "Serving", "as paid", "$/M tokens")
    assert paid == pytest.approx(thousand / 1000 / 8192 * 10**6)
    assert "energy" in result["notes"][0]


@pytest.fixture
def h200(tmp_path):
    """One step of 2 µs on an H200."""
    events = kernel(ts=2, dur=1), launch(), operator(), annotation("ProfilerStep#1")
    return write(tmp_path, *events, deviceProperties=[{"id": 0, "name": "NVIDIA H200"}])


def test_what_is_given_goes_before_what_the_run_knows(capsys, h200):
    result = answer(capsys, h200, "--step-s", "3600", "--price", "2")
    assert mid(result, "Steps", "a thousand steps", "$") == 2000


@pytest.mark.parametrize(
    ("words", "warns"),
    [
        (("--gpu", "H100"), True),
        (("--gpu", "h200"), False),
        # A price is whatever it is of, and a step that was told was not measured there.
        (("--gpu", "H100", "--price", "2"), False),
        (("--gpu", "H100", "--step-s", "2"), False),
    ],
)
def test_a_runs_times_at_another_gpus_price_are_warned_of(capsys, h200, words, warns):
    result = answer(capsys, h200, "--tokens-per-step", "8192", *words)
    assert any("measured on H200" in one for one in result["warnings"]) == warns


def test_a_step_tells_the_rate_of_a_gpu_and_the_energy_of_a_token(capsys):
    words = ("--tokens-per-step", "8000", "--step-s", "2", "--gpus", "4", "--price", "3.6")
    result = answer(capsys, *words, "--joules-per-step", "4000")
    # 1,000 tokens/s of a GPU, at a thousandth of a dollar a second.
    assert mid(result, "Serving", "as paid", "$/M tokens") == 1
    assert mid(result, "Energy", "measured", "J/token") == 0.5
    (step,) = [value for (_, unit), value in figures(result, "Energy").items() if unit == "J/step"]
    assert step["mid"] == 4000


def test_tokens_of_a_step_without_a_step_are_not_guessed(capsys):
    result = answer(capsys, "--gpu", "H100", "--tokens-per-step", "8192", "--gpus", "8")
    assert result["missing"] == [{"topic": "Tokens per second", "give": ["--step-s"]}]


def measured(*kernels, **meta):
    defaults = {
        "gpus": (Gpu(0, "NVIDIA H100 80GB HBM3", rank=0), Gpu(0, "NVIDIA H100 80GB HBM3", rank=1))
    }
    return measured_in(analyzed_trace_of(*kernels, **{**defaults, **meta}))


def test_a_run_counts_the_gpus_of_all_ranks_and_names_them_as_price_lists_do():
    found = measured({"rank": 0}, {"rank": 1})
    assert (found.gpu, found.gpus, found.step_s) == ("H100", 2, None)


def test_unrecorded_steps_go_before_recorded_ones():
    timed = Recording("a rule", 9, (5,), "device", (300_000_000,), (100_000_000, 120_000_000))
    assert measured({}, recording=timed).step_s == 0.11
    alone = Recording("a rule", 9, (5,), "device", (300_000_000,))
    assert measured({}, recording=alone).step_s == 0.3


def test_the_energy_of_a_step_comes_from_the_counter():
    steps = [
        {"kind": "step", "name": str(i), "start_ns": 200 * i, "duration_ns": 200} for i in range(2)
    ]
    samples = [
        {"quantity": "energy_mj", "time_ns": 100 * i, "value": 2_000.0 * i} for i in range(5)
    ]
    found = measured({}, ranges=steps, samples=samples)
    assert found.joules_per_step == 4.0
    assert measured({}, ranges=steps, samples=samples[:2]).joules_per_step is None
    assert measured({}, ranges=steps).joules_per_step is None


def test_gpus_of_different_kinds_have_no_one_price():
    gpus = (Gpu(0, "NVIDIA H100 80GB HBM3", rank=0), Gpu(0, "NVIDIA H200", rank=1))
    assert measured({"rank": 0}, {"rank": 1}, gpus=gpus).gpu is None


def test_a_run_without_a_gpu_says_nothing_of_its_cost():
    found = measured({"activity": "host"}, source="host.json")
    assert (found.gpu, found.gpus, found.step_s, found.joules_per_step) == (None,) * 4
    assert ("host.json" in found.notes[0], "no GPU" in found.notes[0]) == (True, True)
