"""Launching a Triton kernel at the cost of a call into C.

Triton looks at every argument of every launch to find the binary that fits, which takes longer
than many kernels run. Here the caller names what its binary depends on, once.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver

# Read where Triton reads it: when a kernel is decorated.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ALIGNMENT = 16


class Launcher:
    """Launches one kernel; binaries are kept by what they were compiled for."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Hashable, Any] = {}

    def __call__(
        self, key: Hashable, grid: int, arguments: tuple[Any, ...], options: dict[str, int]
    ) -> None:
        """Launch `grid` programs on the current stream.

        `key` has to differ wherever Triton would compile anew: for other dtypes, constants,
        alignments or multiples of 16, or another device.
        """
        compiled = self._compiled.get(key)
        if compiled is None or _is_watched():
            self._compiled[key] = self._kernel[(grid,)](*arguments, **options)
            return
        device = driver.active.get_current_device()
        stream = driver.active.get_current_stream(device)
        metadata = compiled.packed_metadata
        hooks = (None, None, None)
        compiled.run(grid, 1, 1, stream, compiled.function, metadata, *hooks, *arguments)


def _is_watched() -> bool:
    """Tell whether a profiler of Triton's wants to hear of launches."""
    hook = knobs.runtime.launch_enter_hook
    # None before Triton 3.4, since then a chain that may be empty.
    return bool(getattr(hook, "calls", hook))


def alignments(tensors: Sequence[torch.Tensor | None], *steps: int) -> int | tuple[bool | int, ...]:
    """Return what Triton compiles for of these tensors and strides: 0 where all is aligned.

    Else which of them are, and which strides are 1, a constant to Triton: a binary that takes one
    for aligned may not be given another.
    """
    numbers = [0 if one is None else one.data_ptr() for one in tensors]
    together = 0
    for number in (*numbers, *steps):
        together |= number
    if together % ALIGNMENT == 0:
        return 0
    of_steps = [step if step == 1 else step % ALIGNMENT == 0 for step in steps]
    return (*(number % ALIGNMENT == 0 for number in numbers), *of_steps)


def next_power_of_two(number: int) -> int:
    """Return the least power of two that is not smaller."""
    return 1 << max(number - 1, 0).bit_length()
