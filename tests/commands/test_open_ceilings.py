"""Which ceilings a run is held against."""

import gzip
import json

import pytest

from kprof.collect.ceilings import keep_gpu_ceilings, kept_ceilings
from kprof.opened import open_recorded, open_run
from tests.collect.test_ceilings import MEASURED
from tests.kineto_files import kernel


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A recorded run on an H200 under driver 580.1, not yet analyzed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    part = tmp_path / "train.kprof" / "raw" / "rank0-pid9"
    part.mkdir(parents=True)
    (part.parent / "launch.json").write_text('{"command": ["python", "train.py"]}')
    (part.parent / "nvml.jsonl").write_text('{"devices": [{"index": 0, "driver": "580.1"}]}\n')
    (part / "recorder.json").write_text('{"rank": 0}')
    gpus = [{"id": 0, "name": "NVIDIA H200"}]
    content = {"deviceProperties": gpus, "baseTimeNanoseconds": 5, "traceEvents": [kernel()]}
    (part / "window-0.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))
    return part.parents[1]


def test_a_run_is_held_against_what_was_measured_on_its_gpu_and_keeps_it(run):
    keep_gpu_ceilings(MEASURED)
    device = open_recorded(run).trace.meta.device
    assert device == MEASURED.as_device()
    assert kept_ceilings(run / "raw") == device


def test_an_unmeasured_gpu_has_its_datasheets_ceilings(run):
    device = open_recorded(run).trace.meta.device
    assert not device.is_measured
    assert device.memory_bytes_per_s == 4.8e12
    assert kept_ceilings(run / "raw") is None


def test_another_drivers_measurement_does_not_count(run):
    keep_gpu_ceilings(MEASURED)
    (run / "raw" / "nvml.jsonl").write_text('{"devices": [{"index": 0, "driver": "590.2"}]}\n')
    assert not open_recorded(run).trace.meta.device.is_measured


def test_what_a_run_kept_stays_with_it_wherever_it_is_opened(run, monkeypatch, tmp_path):
    keep_gpu_ceilings(MEASURED)
    open_recorded(run)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert open_run([run], None, force=True).trace.meta.device == MEASURED.as_device()
