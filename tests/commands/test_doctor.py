"""What the doctor says about a machine, from files and answers made up here."""

import pytest

from kprof.commands.doctor import (
    Check,
    check_counters,
    check_gpus,
    check_machine,
    check_other_profilers,
    check_package,
    check_sandbox,
    check_throttling,
    check_tool,
    what_works,
)
from kprof.device import THROTTLE_REASONS
from tests.collect.test_nvml import ANSWERS, StandIn


@pytest.fixture
def parameters(tmp_path):
    folder = tmp_path / "proc/driver/nvidia"
    folder.mkdir(parents=True)
    return folder / "params"


def test_counters_for_administrators_only_are_limited_for_others(tmp_path, parameters):
    parameters.write_text("RmProfilingAdminOnly: 1\n")
    check = check_counters(tmp_path, is_root=False)
    assert check.state == "limited"
    assert "NVreg_RestrictProfilingToAdminUsers=0" in check.fix


def test_an_administrator_may_read_counters(tmp_path, parameters):
    parameters.write_text("RmProfilingAdminOnly: 1\n")
    assert check_counters(tmp_path, is_root=True).state == "ok"


def test_counters_open_to_all_are_ok(tmp_path, parameters):
    parameters.write_text("RmProfilingAdminOnly: 0\n")
    assert check_counters(tmp_path, is_root=False).state == "ok"


def test_no_driver_means_no_counters(tmp_path):
    assert check_counters(tmp_path, is_root=True).state == "missing"


def test_a_gpu_held_at_its_power_limit_is_named():
    check = check_throttling(StandIn())
    assert (check.name, check.state) == ("throttling", "limited")
    assert check.found == f"GPU 0: {THROTTLE_REASONS[4]}"
    assert "power limit" in check.fix


def test_a_divided_gpu_is_limited(monkeypatch):
    monkeypatch.setitem(ANSWERS, "nvmlDeviceGetMigMode", [1, 1])
    assert check_gpus(StandIn()).state == "limited"


def test_another_profiler_is_found_by_its_variable_or_its_process():
    check = check_other_profilers({"CUDA_INJECTION64_PATH": "/x"}, ("bash", "nsys"))
    assert check.found == "CUDA_INJECTION64_PATH, nsys"


def test_without_another_profiler_all_is_well():
    assert check_other_profilers({"HOME": "/"}, ("bash",)).state == "ok"


def test_firecracker_is_recognized_by_its_kernel(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/version").write_text("Linux version 6.1.0-fc-gpu (builder)")
    assert check_sandbox(tmp_path).found.startswith("Firecracker")


def test_a_missing_tool_is_optional():
    assert "optional" in check_tool("no-such-tool", "nothing", ()).fix


def checks(**states):
    return tuple(Check(name, state, "") for name, state in states.items())


def test_without_a_gpu_the_sum_is_host_mode():
    total = what_works(checks(torch="limited", GPUs="missing", CUPTI="missing"))
    assert total.state == "limited"
    assert total.found.startswith("host mode")


def test_with_everything_the_sum_is_ok():
    assert what_works(checks(torch="ok", GPUs="ok", CUPTI="ok")).state == "ok"


def test_every_check_that_is_not_ok_says_what_was_found():
    assert all(check.found for check in check_machine())


def test_an_optional_package_is_named_with_what_it_is_for():
    install = "pip install nothing"
    found = check_package("triton_of_nobody", "nothing", "kernels", install)
    assert found.state == "missing"
    assert "kernels" in found.fix and found.fix.endswith(install)
    assert check_package("rich", "rich", "terminals", "").state == "ok"
