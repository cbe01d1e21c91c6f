"""Launchers are built while kernels are compiled, and those are what Triton asks for."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import json
import subprocess
import sys

import pytest
import torch
from torch import nn
from triton import knobs

from kprof.sites import _ways
from kprof.swap import swapped
from tests.kernel_hopper import on_hopper

BUILT = """
import json, os, tempfile, torch
from unittest.mock import patch
from triton import knobs
from triton.backends.nvidia import driver
from triton.runtime import build
from kprof.kernels import _ahead, _launchers
from kprof.kernels.rmsnorm import rmsnorm

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
kernels, built, asked = [], [], []

def kept(kernel):
    kernels.append(kernel)

def counted(name, src, *others):
    built.append(name)
    path = f"{tempfile.mkdtemp()}/{name}.so"
    open(path, "w").close()
    return path

def hook(**told):
    asked.append(told["fn"].name)

def loaded(name, path):
    return type(name, (), {"launch": None})

x, weight = torch.zeros(4, 256, dtype=torch.bfloat16), torch.ones(256, dtype=torch.bfloat16)
with (
    patch.object(_ahead, "_read", kept),
    patch.object(build, "_build", counted),
    patch.object(build, "_load_module_from_path", loaded),
    patch.object(driver, "library_dirs", list),
):
    knobs.runtime.jit_cache_hook = hook
    _launchers.begin()
    _launchers.begin()
    _ahead.compile_ahead(lambda: rmsnorm(x, weight, 1e-6))
    _launchers.end()
    is_as_it_was = knobs.runtime.jit_cache_hook is hook
    for thread in _launchers.building:
        thread.join()
    ahead = len(built)
    for kernel in kernels:
        driver.CudaLauncher(kernel.src, kernel.metadata)
print(json.dumps([len(kernels), ahead, len(built), asked, is_as_it_was]))
"""


@pytest.mark.slow
def test_what_is_built_ahead_is_what_triton_asks_for_and_others_hooks_are_called():
    kernels, ahead, in_all, asked, is_as_it_was = json.loads(on_hopper(BUILT))
    assert kernels == ahead == in_all == len(asked) == 1
    assert is_as_it_was


def hook(**told):
    return None


def test_triton_is_as_it_was_once_no_swap_is_on(monkeypatch):
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", hook)
    models = nn.Linear(2, 2), nn.Linear(2, 2)
    with swapped(models[0], "rmsnorm"):
        assert knobs.runtime.jit_cache_hook.former is hook
        with swapped(models[1], "rmsnorm"):
            pass
        assert knobs.runtime.jit_cache_hook.former is hook
    assert knobs.runtime.jit_cache_hook is hook


def test_who_changed_triton_while_a_swap_is_on_keeps_that(monkeypatch):
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", None)
    with swapped(nn.Linear(2, 2), "rmsnorm"):
        knobs.runtime.jit_cache_hook = hook
    assert knobs.runtime.jit_cache_hook is hook


def test_a_swap_imports_no_compiler_of_torchs():
    asked = "import sys, kprof.swap; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_constant_is_marked_as_torch_marks_it():
    def one():
        return True

    def other():
        return True

    _ways._as_constant(one)
    torch.compiler.assume_constant_result(other)
    assert vars(one) == vars(other)
