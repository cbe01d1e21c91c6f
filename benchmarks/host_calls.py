"""What a call of a kernel takes the host without the launch itself: on any machine, in seconds.

python benchmarks/host_calls.py

Kernels pretend to be compiled, and the launch does nothing: the comparisons, the results and the
way to the launcher are left.
"""

import argparse
import os
import timeit
import types
from functools import partial

os.environ["TRITON_INTERPRET"] = "1"

import torch

from kprof.kernels import OURS, kernel_named, runtime
from kprof.kernels.runtime import Launcher

KERNELS = ("rmsnorm", "add_rmsnorm", "layernorm", "swiglu", "softmax", "relu_squared", "rope")
FP8_KERNELS = ("quantize_fp8",)


class Run:
    """Stands for Triton's launcher."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False

    def launch(self, *arguments):
        """Do nothing."""


class Kernel:
    """Stands for a kernel of Triton's."""

    def __getitem__(self, grid):
        """Return what compiles it for its arguments."""
        return compiled


def compiled(*arguments, **options):
    """Stand for what Triton makes of a kernel."""
    signature = {place: type_of(one) for place, one in enumerate(arguments)}
    source = types.SimpleNamespace(signature=signature)
    return types.SimpleNamespace(run=Run(), packed_metadata=(4, 1, 0), function=0, src=source)


def type_of(argument):
    """Return a type of Triton's for an argument."""
    if isinstance(argument, torch.Tensor):
        return "*bf16"
    return {int: "i64", float: "fp32"}.get(type(argument), "constexpr")


def pretend():
    """Let all launches be of kernels and of a device that are not there."""
    told = {"get_current_device": lambda: -1, "get_current_stream": lambda device: 0}
    active = types.SimpleNamespace(active=types.SimpleNamespace(**told))
    runtime.driver = active
    begin = Launcher.__init__

    def begin_pretended(self, kernel):
        begin(self, Kernel())

    Launcher.__init__ = begin_pretended


def tensors(name):
    """Return small arguments of a kernel."""
    x, other, weight = (torch.randn(*s).bfloat16() for s in ((5, 128), (5, 128), (128,)))
    if name == "rope":
        q, k = (torch.randn(1, 16, n, 64).bfloat16().transpose(1, 2) for n in (4, 2))
        return (q, k, *(torch.randn(1, 16, 64).bfloat16() for _ in range(2)))
    given = {
        "add_rmsnorm": (x, other, weight),
        "layernorm": (x, weight, None),
        "swiglu": (x, other),
    }
    return given.get(name, (x, weight) if name.startswith("rms") else (x,))


def best_us(call, repeats):
    """Return the best of so many times 200 calls."""
    for _ in range(5):
        call()
    return min(timeit.repeat(call, number=200, repeat=repeats)) / 200 * 1e6


def main():
    """Print what each call takes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=300)
    repeats = parser.parse_args().repeats
    pretend()
    x = tensors("softmax")[0]
    with torch.no_grad():
        for name, call in (("empty_like", torch.empty_like), ("neg", torch.neg)):
            print(f"{'torch.' + name:22} {best_us(partial(call, x), repeats):6.2f} us")
        for name in (*KERNELS, *FP8_KERNELS):
            call = partial(kernel_named(name).provider(OURS).load(), *tensors(name))
            print(f"{name:22} {best_us(call, repeats):6.2f} us", flush=True)


if __name__ == "__main__":
    main()
