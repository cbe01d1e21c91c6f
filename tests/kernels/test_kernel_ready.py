"""What launches kernels is built while they are compiled, and that is what Triton asks for."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import json
import subprocess
import sys

import pytest
import torch

from kprof.kernels.swap import dispatch
from tests.kernels.kernel_hopper import on_hopper

BUILT = """
import json, os, tempfile, threading, time, torch
from unittest.mock import patch
from triton.backends.nvidia import driver
from triton.runtime import build
from kprof.kernels import runtime as _ready
from kprof.kernels.bench import ahead
from kprof.kernels.attention._triton import Options
from kprof.kernels.attention._hopper import run_on_hopper
from kprof.kernels.norm import rmsnorm
from kprof.kernels.gated import swiglu
import kprof.kernels.attention._hopper_kernel

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
kernels, built = [], []

def kept(kernel, launch):
    kernels.append(kernel)

def counted(name, *others):
    time.sleep(0.5)
    built.append(name)
    path = f"{tempfile.mkdtemp()}/{name}.so"
    open(path, "w").close()
    return path

def loaded(name, path):
    return type(name, (), {"launch": None, "prepare": None})

def waited():
    for thread in threading.enumerate():
        if thread.daemon:
            thread.join()
    return sorted(built)

def called(function, *arguments):
    ahead.compile_ahead(lambda: function(*arguments))
    return built.count("__triton_launcher"), waited()

x, weight = torch.zeros(4, 256, dtype=torch.bfloat16), torch.ones(256, dtype=torch.bfloat16)
q = torch.zeros(1, 2, 256, 64, dtype=torch.bfloat16)
with (
    patch.object(ahead, "_read", kept),
    patch.object(build, "_build", counted),
    patch.object(build, "_load_module_from_path", loaded),
    patch.object(driver, "library_dirs", list),
):
    _ready.build_beside()
    _ready.build_beside()
    found = [called(rmsnorm, x, weight, 1e-6) for _ in range(2)]
    found.append(called(swiglu, x, x))
    found.append(called(run_on_hopper, q, q, q, None, None, Options(0.1, True, 0, 256)))
    for kernel in kernels[:3]:
        driver.CudaLauncher(kernel.src, kernel.metadata)
    found.append([len(built), waited()])
print(json.dumps([[kernel.name for kernel in kernels], found]))
"""


@pytest.mark.slow
def test_what_is_built_beside_is_what_triton_asks_for_once():
    kernels, found = json.loads(on_hopper(BUILT))
    first = ["__triton_launcher"]
    # For other arguments another one; for descriptors nothing; each before the kernel is launched.
    both = 2 * first
    assert len(kernels) == 4
    assert found == [[1, first], [1, first], [2, both], [2, both], [2, both]]


@pytest.mark.slow
def test_a_swap_imports_no_compiler_of_torchs():
    asked = "import sys, kprof.kernels.swap.swapping; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_constant_is_marked_as_torch_marks_it():
    def one():
        return True

    def other():
        return True

    dispatch._as_constant(one)
    torch.compiler.assume_constant_result(other)
    assert vars(one) == vars(other)
