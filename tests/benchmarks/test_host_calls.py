"""The host time of calls without their launches can be measured on any machine."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_host_time_of_calls_is_measured_without_a_gpu():
    script = Path(__file__).parents[2] / "benchmarks" / "host_calls.py"
    command = [sys.executable, str(script), "--repeats", "1"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    us = {line.split()[0]: float(line.split()[1]) for line in told.splitlines()}
    assert {"rmsnorm", "swiglu", "rope", "quantize_fp8"} <= set(us)
    assert min(us.values()) > 0
