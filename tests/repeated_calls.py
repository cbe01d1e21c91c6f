"""Kernels that pretend to be compiled, and a driver that does their work at its addresses."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import ctypes
import itertools
import types

import torch
import triton.backends.nvidia.driver as triton_driver

from kprof.kernels import _launch, _repeated
from kprof.kernels._launch import Launcher, kind_of
from kprof.kernels._operator import define

LAUNCH = ctypes.CFUNCTYPE(
    *(ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p),
    *(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p),
)
SIGNATURE = ("*fp32", "*fp32", "*fp32", "i64", "fp32", "constexpr")
STREAM = 40
_numbers = itertools.count()


class Run:
    """Stands for Triton's launcher; does the kernel's work."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False

    def __init__(self, told, **options):
        self._told = told
        self.__dict__.update(options)

    def launch(self, *arguments):
        self._told.append("Triton's C")
        Kernel.work(*arguments[-6:])

    __call__ = launch


class Kernel:
    """Stands for a kernel that compiles: y = factor * x, plus bias."""

    def __init__(self, told, num_ctas=1, signature=SIGNATURE, **options):
        self._told, self._num_ctas, self._signature = told, num_ctas, signature
        self._options = options

    def __getitem__(self, grid):
        return self._compile

    @staticmethod
    def work(x, bias, y, size, factor, block):
        y.copy_(factor * x + (0 if bias is None else bias))

    def _compile(self, *arguments, **options):
        self._told.append("Triton")
        self.work(*arguments)
        kinds = [
            "constexpr" if one is None else kind
            for kind, one in zip(self._signature, arguments, strict=True)
        ]
        return types.SimpleNamespace(
            run=Run(self._told, **self._options),
            packed_metadata=(4, self._num_ctas, 512),
            function=7,
            src=types.SimpleNamespace(signature=dict(enumerate(kinds))),
        )


class Case:
    """An operator of its own, and who launched for it."""

    def __init__(self, is_one_launch=True, **options):
        self.told = []
        self.refuses = False
        self.device = -1
        self.launcher = Launcher(Kernel(self.told, **options))
        self.driver = LAUNCH(self._launch)
        name = f"tested_{next(_numbers)}"
        schema = f"{name}(Tensor x, Tensor? bias, float factor) -> Tensor[]"
        self.call = define(schema, self._run, self._empty, is_one_launch=is_one_launch)
        self.operator = getattr(torch.ops.kprof, name).default

    @staticmethod
    def _empty(x, bias, factor):
        return [torch.empty_like(x)]

    def _run(self, x, bias, factor):
        self.told.append("run")
        (y,) = results = self._empty(x, bias, factor)
        tensors, call = (x, bias, y), (kind_of(x, bias), factor)
        if not self.launcher.again(call, tensors):
            arguments = (*tensors, x.numel(), factor, 128)
            key = x.dtype, x.shape, bias is None, factor
            self.launcher(key, (3, 1, 1), arguments, {}, call=call, tensors=tensors)
        return results

    def _launch(self, function, *rest):
        *grid_and_block, shared, stream, parameters, extra = rest
        assert (function, *grid_and_block) == (7, 3, 1, 1, 128, 1, 1)
        assert (shared, stream, extra) == (512, STREAM - 1, None)
        if self.refuses:
            return 700
        self.told.append("driver")

        def read(place, kind):
            return ctypes.cast(parameters[place], ctypes.POINTER(kind))[0]

        addresses = [read(place, ctypes.c_uint64) for place in range(3)]
        # Without a bias there is one address less.
        has_bias = addresses[2] > 2**32
        size, factor, *scratch = (
            read(2 + has_bias + place, kind)
            for place, kind in enumerate((ctypes.c_int64, ctypes.c_float, *[ctypes.c_uint64] * 2))
        )
        assert scratch == [0, 0]
        x, *bias, y = ((ctypes.c_float * size).from_address(a) for a in addresses[: 2 + has_bias])
        for place in range(size):
            y[place] = factor * x[place] + (bias[0][place] if bias else 0)
        return 0

    def who(self, *arguments):
        """Call, check the results, and return who launched."""
        self.told.clear()
        (y,) = self.call(*arguments)
        x, bias, factor = arguments
        assert torch.equal(y, factor * x + (0 if bias is None else bias))
        return self.told[-1]

    def learn(self, *arguments):
        """Call until the driver is called at once."""
        for _ in range(4):
            self.who(*arguments)
        assert self.told == ["driver"]


def pretend(monkeypatch):
    """Let launches be those of the last case in the list that this returns, on the host."""
    cases = []
    active = types.SimpleNamespace(
        get_current_device=lambda: cases[-1].device,
        get_current_stream=lambda device: STREAM + device,
    )
    for module in (_launch, _repeated):
        monkeypatch.setattr(module, "driver", types.SimpleNamespace(active=active))
        monkeypatch.setattr(module, "HAS_KNOWN_LAUNCHER", True)
    monkeypatch.setattr(triton_driver, "CudaLauncher", Run)

    def address():
        return ctypes.cast(cases[-1].driver, ctypes.c_void_p).value

    monkeypatch.setattr(_repeated, "_driver_launch", address)
    return cases
