"""Sampling through NVML, with a stand-in for the driver."""

import json
import sys
from types import SimpleNamespace

from kprof.collect.nvml import Nvml, Sampler, describe_devices, read_sample, visible_devices

ANSWERS = {
    "nvmlSystemGetDriverVersion": "580.1",
    "nvmlDeviceGetName": "NVIDIA H200",
    "nvmlDeviceGetUUID": "GPU-1",
    "nvmlDeviceGetPowerUsage": 123_456,
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=1000, used=400),
    "nvmlDeviceGetClockInfo": 1980,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 4,
    "nvmlDeviceGetMigMode": [0, 0],
}


class StandIn:
    def __init__(self, handles=(0,), problem=None):
        self.handles = {index: index for index in handles}
        self.problem = problem

    def ask(self, name, *arguments):
        return ANSWERS.get(name)

    def constant(self, name):
        return name

    def close(self):
        self.handles = {}


def test_power_is_in_watts_and_the_memory_in_bytes():
    sample = read_sample(StandIn(), 0)
    assert sample["power_w"] == 123.456
    assert sample["memory_used_bytes"] == 400
    assert sample["throttle_reasons"] == 4


def test_what_nvml_cannot_tell_is_left_out():
    assert "temperature_c" not in read_sample(StandIn(), 0)


def test_devices_are_described_once():
    assert describe_devices(StandIn()) == [
        {
            "index": 0,
            "name": "NVIDIA H200",
            "uuid": "GPU-1",
            "driver": "580.1",
            "memory_bytes": 1000,
            "is_mig": False,
        }
    ]


def test_the_file_holds_the_devices_and_then_the_samples(tmp_path):
    sampler = Sampler(tmp_path / "nvml.jsonl", StandIn)
    sampler.start()
    sampler.stop()
    first, second, *_ = (tmp_path / "nvml.jsonl").read_text().splitlines()
    assert json.loads(first)["devices"][0]["name"] == "NVIDIA H200"
    assert json.loads(second)["sm_clock_mhz"] == 1980


def test_without_a_driver_there_is_a_reason_and_no_file(tmp_path):
    problem = "no NVML: no driver"
    sampler = Sampler(tmp_path / "nvml.jsonl", lambda: StandIn((), problem))
    sampler.start()
    sampler.stop()
    assert sampler.problem == problem
    assert not (tmp_path / "nvml.jsonl").exists()


def test_a_gpu_that_cannot_be_reached_is_a_reason_and_no_failure(monkeypatch):
    error = LookupError("GPU is lost")

    def give_up(index):
        raise error

    driver = SimpleNamespace(
        NVMLError=LookupError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=give_up,
        nvmlShutdown=lambda: None,
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    nvml = Nvml()
    assert (nvml.problem, nvml.handles) == (f"no NVML: {error}", {})
    nvml.close()


DEVICES = [{"index": 0, "uuid": "GPU-aaa"}, {"index": 1, "uuid": "GPU-bbb"}]


def test_only_visible_gpus_are_sampled():
    assert visible_devices(DEVICES, {"CUDA_VISIBLE_DEVICES": "1"}) == (1,)


def test_visible_gpus_stand_in_the_order_in_which_cuda_counts_them():
    assert visible_devices(DEVICES, {"CUDA_VISIBLE_DEVICES": "1,0"}) == (1, 0)


def test_a_gpu_can_be_made_visible_by_its_name():
    assert visible_devices(DEVICES, {"CUDA_VISIBLE_DEVICES": "GPU-aa"}) == (0,)


def test_without_the_variable_every_gpu_is_sampled():
    assert visible_devices(DEVICES, {}) == (0, 1)
