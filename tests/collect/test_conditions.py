"""What a GPU is like around a sample, with stand-ins for torch and the driver."""

import sys
from types import SimpleNamespace

import pytest

from kprof.collect.nvml import Watcher
from kprof.timing import Conditions

REASONS = "nvmlDeviceGetCurrentClocksThrottleReasons"


class Driver:
    """One GPU at 1,500 MHz, with these numbers of processes, one a question."""

    def __init__(self, *counts):
        self.handles = {0: "gpu 0", 1: "gpu 1"}
        self.counts = iter(counts)
        self.asked = []
        self.reasons = None

    def ask(self, name, *arguments):
        self.asked.append((name, *arguments))
        if name == "nvmlDeviceGetComputeRunningProcesses":
            count = next(self.counts)
            return None if count is None else [object()] * count
        return {"nvmlDeviceGetClockInfo": 1500, REASONS: self.reasons}.get(name)

    def constant(self, name):
        return name

    def close(self):
        self.handles = {}


@pytest.fixture
def cuda(monkeypatch):
    state = SimpleNamespace(is_initialized=lambda: True, current_device=lambda: 1)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=state))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return state


def test_the_clock_is_that_of_the_current_device(cuda):
    driver = Driver(1, 1)
    assert Watcher(lambda: driver).read() == Conditions(1500.0, 0)
    assert ("nvmlDeviceGetClockInfo", "gpu 1", "NVML_CLOCK_SM") in driver.asked


def test_a_process_that_comes_later_is_another(cuda):
    watcher = Watcher(lambda: Driver(2, 2, 3))
    assert [watcher.read().num_others, watcher.read().num_others] == [0, 1]


def test_a_process_that_was_there_before_is_a_neighbour(cuda):
    assert Watcher(lambda: Driver(3)).num_neighbours == 2


def test_a_process_that_leaves_is_not_counted_below_none(cuda):
    watcher = Watcher(lambda: Driver(2, 1))
    assert watcher.read().num_others == 0


def test_a_driver_that_does_not_tell_the_processes_leaves_them_missing(cuda):
    watcher = Watcher(lambda: Driver(None, None))
    assert watcher.read().num_others is None


def test_where_the_processes_at_the_beginning_are_not_known_none_is_a_newcomer(cuda):
    watcher = Watcher(lambda: Driver(None, 3))
    assert watcher.num_neighbours is None
    assert watcher.read().num_others is None


@pytest.mark.parametrize(("reasons", "is_braked"), [(0x4, False), (0x44, True), (0x8, True)])
def test_heat_holds_a_clock_back_and_the_power_cap_does_not(cuda, reasons, is_braked):
    driver = Driver(1, 1)
    driver.reasons = reasons
    conditions = Watcher(lambda: driver).read()
    assert conditions.is_braked is is_braked
    assert bool(conditions.problem) is is_braked


def test_without_a_gpu_in_use_nothing_is_known_and_no_driver_is_opened(monkeypatch):
    state = SimpleNamespace(is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=state))
    assert Watcher(pytest.fail).read() == Conditions()
