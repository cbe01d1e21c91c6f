"""Ahead-of-time compilation of kernels for a GPU that is not installed."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kprof.kernels.runtime import Launcher

HOPPER, BLACKWELL = GPUTarget("cuda", 90, 32), GPUTarget("cuda", 100, 32)


@dataclass(frozen=True)
class Launch:
    """Arguments of a launch, without tensors."""

    grid: tuple[int, ...]
    scalars: tuple[object, ...]
    """Scalar arguments, constants included, in the kernel's order."""
    options: tuple[tuple[str, int], ...]
    """Triton's, such as `num_warps`."""


@dataclass(frozen=True)
class Binary:
    """One kernel as compiled for the target."""

    name: str
    capability: int
    """Ten times the compute capability of its target."""
    num_registers: int
    """Per thread."""
    spilled_bytes: int
    """Local memory per thread, for values that do not fit the registers."""
    shared_bytes: int
    cubin: bytes = field(repr=False)
    """The binary."""
    ptx: str = field(repr=False)
    launch: Launch


def compile_ahead(call: Callable[[], object], target: GPUTarget = HOPPER) -> list[Binary]:
    """Return the compiled kernels that `call` would launch on a GPU; nothing runs.

    `call` uses tensors on the host, of which only shape, dtype and address count. Triton must not
    have been imported for its interpreter.
    """
    compiled: list[Any] = []

    def keep(
        self: Launcher,
        key: object,
        grid: int | tuple[int, ...],
        arguments: tuple[Any, ...],
        options: dict[str, int],
        **known: Any,
    ) -> None:
        # Compiled code does not depend on the grid.
        kernel = self._kernel.warmup(*arguments, grid=(1,), **options)
        scalars = tuple(one for one in arguments if isinstance(one, int | float | str | None))
        grid = grid if isinstance(grid, tuple) else (grid,)
        compiled.append((kernel, Launch(grid, scalars, tuple(sorted(options.items())))))

    with (
        patch.object(driver, "_active", _PretendedDriver(target)),
        patch.object(Launcher, "__call__", keep),
    ):
        call()
    return [_read(kernel, launch) for kernel, launch in compiled]


def disassemble(binary: Binary) -> str:
    """Return the SASS of a kernel: labels, and one instruction per line."""
    return _told(binary.cubin, "nvdisasm", "--print-code")


class _PretendedDriver:
    """Answers Triton's queries to a driver during compilation."""

    def __init__(self, target: GPUTarget = HOPPER) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        # Triton caches compiled kernels by device, and a device has one target.
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0


def _read(kernel: Any, launch: Launch) -> Binary:
    cubin = kernel.asm["cubin"]
    told = _told(cubin, "cuobjdump", "--dump-resource-usage")
    figures = {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", told)}
    return Binary(
        name=kernel.metadata.name,
        capability=kernel.metadata.target.arch,
        num_registers=figures["REG"],
        spilled_bytes=figures["STACK"] + figures["LOCAL"],
        shared_bytes=kernel.metadata.shared,
        cubin=cubin,
        ptx=kernel.asm["ptx"],
        launch=launch,
    )


def _told(cubin: bytes, program: str, option: str) -> str:
    """Return the output of one of Triton's CUDA tools for a binary."""
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / program
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(path), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
