"""Operators that are one launch: what reaches the driver when their calls are made again in C."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import ctypes
import gc
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kprof.kernels import _launch
from kprof.kernels._launch import Launcher
from kprof.kernels._operator import _Recent
from tests.kernel_hopper import on_hopper
from tests.repeated_calls import LAUNCH, Kernel, Run, pretend


@pytest.fixture(autouse=True)
def cases(monkeypatch):
    with torch.no_grad():
        yield pretend(monkeypatch)


def _inputs():
    x, up, weight = torch.ones(4, 64), torch.zeros(4, 64), torch.ones(64)
    q, k, cos, sin = (torch.ones(1, heads, 4, 8) for heads in (4, 2, 1, 1))
    return x, up, weight, q, k, cos[:, 0], sin[:, 0]


def _calls():
    """Calls of all public functions that are one launch, by name."""
    from kprof.kernels.add_layernorm import add_layernorm
    from kprof.kernels.add_rmsnorm import add_rmsnorm
    from kprof.kernels.layernorm import layernorm
    from kprof.kernels.quantize_fp8 import quantize_fp8
    from kprof.kernels.relu_squared import relu_squared
    from kprof.kernels.rmsnorm import rmsnorm
    from kprof.kernels.rmsnorm_quantize_fp8 import rmsnorm_quantize_fp8
    from kprof.kernels.rope import rope, rope_
    from kprof.kernels.softmax import softmax
    from kprof.kernels.swiglu import swiglu

    return {
        "rmsnorm": lambda x, up, w, *_: ((x, w), (rmsnorm(x, w),)),
        "add_rmsnorm": lambda x, up, w, *_: ((x, up, w), add_rmsnorm(x, up, w)),
        "layernorm": lambda x, up, w, *_: ((x, w), (layernorm(x, w, None),)),
        "add_layernorm": lambda x, up, w, *_: ((x, up, w), add_layernorm(x, up, w, None)),
        "softmax": lambda x, *_: ((x,), (softmax(x),)),
        "relu_squared": lambda x, *_: ((x,), (relu_squared(x),)),
        "swiglu": lambda x, up, *_: ((x, up), (swiglu(x, up),)),
        "rope": lambda *all_: (all_[3:], rope(*all_[3:])),
        "rope_": lambda *all_: (all_[3:] + all_[3:5], rope_(*all_[3:]) and ()),
        "quantize_fp8": lambda x, *_: ((x,), quantize_fp8(x, "1x128")),
        "rmsnorm_quantize_fp8": lambda x, up, w, *_: ((x, w), rmsnorm_quantize_fp8(x, w)),
    }


class _Silent(Kernel):
    """Compiles anything, and does nothing."""

    @staticmethod
    def work(*arguments):
        pass

    def _compile(self, *arguments, **options):
        self._signature = ["*fp32" if isinstance(one, Tensor) else "i64" for one in arguments]
        self._signature = [
            "fp32" if isinstance(one, float) else kind
            for kind, one in zip(self._signature, arguments, strict=True)
        ]
        return super()._compile(*arguments, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", _calls())
def test_operators_of_one_launch_hand_the_driver_their_inputs_and_results(cases, monkeypatch, name):
    addresses = []

    def launch(*arguments):
        parameters = arguments[-2]
        addresses[:] = [
            ctypes.cast(parameters[place], ctypes.POINTER(ctypes.c_uint64))[0]
            for place in range(num_tensors)
        ]
        return 0

    driver = LAUNCH(launch)
    cases.append(types.SimpleNamespace(device=-1, driver=driver))
    # What other tests called in this process may have put off noting the next calls.
    for recent in [one for one in gc.get_objects() if type(one) is _Recent]:
        monkeypatch.setattr(recent, "_pause", 0)
    for launcher in [one for one in gc.get_objects() if type(one) is Launcher]:
        monkeypatch.setattr(launcher, "_kernel", _Silent([]))
        for kept in (launcher._binaries, launcher._calls):
            kept.clear()
    monkeypatch.setattr(Run, "launch", lambda *arguments: None)
    call, recent = _calls()[name], _launch.recent_calls
    num_tensors = 2
    for _ in range(4):
        call(*_inputs())
    assert any(recent)
    given, made = call(*(inputs := _inputs()))
    num_tensors = len(given) + len(made)
    given, made = call(*inputs)
    assert addresses == [one.data_ptr() for one in (*given, *made)]
    for calls in recent:
        calls.clear()


@pytest.mark.slow
def test_what_calls_take_without_their_launches_is_measured_anywhere():
    script = Path(__file__).parents[1] / "benchmarks" / "host_calls.py"
    command = [sys.executable, str(script), "--repeats", "1"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    measured = [line.split()[0] for line in told.splitlines() if "in C" in line]
    assert {"rmsnorm", "swiglu", "rope", "quantize_fp8"} <= set(measured)


_HANDED_OVER = """
import re
from unittest.mock import patch

import torch

from kprof.kernels import _ahead, _repeated
from kprof.kernels.rmsnorm import rmsnorm
from kprof.kernels.rope import rope

TYPES = {"*": "u64", "i64": "u64", "i32": "u32", "fp32": "f32"}


def told(compiled, arguments, num_tensors):
    entry = re.search(r"[.]entry[^(]*[(](.*?)[)]", compiled.asm["ptx"], re.S)[1]
    wanted = re.findall(r"[.]param [.](\\w+)", entry)
    values, sources, _ = _repeated._parameters(
        compiled, arguments, {place: place for place in range(num_tensors)}
    )
    kinds = [kind for kind in compiled.src.signature.values() if kind != "constexpr"]
    given = [TYPES["*" if kind[0] == "*" else kind] for kind in kinds] + ["u64", "u64"]
    print(given == wanted, len(values) == 8 * len(wanted), len(sources) == len(wanted))


def keep(self, key, grid, arguments, options, *, call, tensors):
    told(self._kernel.warmup(*arguments, grid=(1,), **options), arguments, len(tensors))


x, q, angles = torch.ones(4, 64), torch.ones(1, 2, 4, 8), torch.ones(1, 4, 8)
with (
    torch.no_grad(),
    patch.object(_ahead.driver, "_active", _ahead._PretendedDriver()),
    patch.object(_ahead.Launcher, "__call__", keep),
):
    rmsnorm(x, torch.ones(64))
    rope(q, q.clone(), angles, angles.clone())
"""


def test_what_is_handed_over_is_what_the_compiled_kernel_takes():
    assert on_hopper(_HANDED_OVER) == 2 * "True True True\n"
