"""`kprof fit`: what it reads, and how it answers."""

import json

import pytest

from tests.analyze.test_fit import CONFIG
from tests.commands.test_cli import kprof

TARGET = ("--target", "ttf64_p99<=100ms")


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "small"
    found.mkdir()
    (found / "config.json").write_text(json.dumps(CONFIG))
    return found


def test_it_answers_for_every_model_dtype_and_gpu(folder, tmp_path, capsys):
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**CONFIG, "num_hidden_layers": 3}))
    assert kprof("fit", folder, other, *TARGET, "--json", "--prompt", "32") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["need"]["tokens"] == 64
    assert told["need"]["prompt"] == 32
    assert len(told["fits"]) == 8
    assert {one["model"] for one in told["fits"]} == {"small", "other"}
    assert {one["verdict"] for one in told["fits"]} == {"can"}


def test_a_measured_roofline_takes_the_place_of_the_known_gpus(folder, tmp_path, capsys):
    figure = {"name": "DRAM read", "value": 1e12, "unit": "B/s"}
    ceilings = {
        "gpu": "NVIDIA L4",
        "driver": "1",
        "date": "2026-01-01",
        "torch": "2",
        "num_sms": 58,
        "memory_bytes": 24 << 30,
        "took_s": 1.0,
        "before": {},
        "after": {},
        "figures": [figure],
    }
    file = tmp_path / "roofline.json"
    file.write_text(json.dumps(ceilings))
    assert kprof("fit", folder, *TARGET, "--json", "--roofline", file) == 0
    (gpu,) = json.loads(capsys.readouterr().out)["gpus"]
    assert gpu["read_bytes_per_s"] == 1e12


@pytest.mark.parametrize("target", ["e2e_p99<=1s", "throughput>=10tok/s", "soon"])
def test_a_target_on_something_else_is_refused(folder, target):
    assert kprof("fit", folder, "--target", target) == 2


@pytest.mark.parametrize("text", [None, "{", "[]", '{"model_type": "gpt2"}'])
def test_what_is_no_configuration_of_a_decoder_is_refused(tmp_path, text):
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    assert kprof("fit", file, *TARGET) == 2


def test_what_is_no_roofline_is_refused(folder):
    assert kprof("fit", folder, *TARGET, "--roofline", folder / "config.json") == 2
