"""Launching a Triton kernel at the cost of a call into C.

Triton looks at every argument of every launch to find the binary that fits, which takes longer
than many kernels run. Here the caller names what its binary depends on, once; and a call like one
before, with other tensors, repeats its launch without working out anything again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

ALIGNMENT = 16
"""In bytes, or elements of a stride: what Triton compiles a faster binary for."""
HAS_KNOWN_LAUNCHER = triton.__version__.startswith("3.6.")
"""Whether Triton's launcher takes arguments in the order that `_binary_of` hands over."""
# Read where Triton reads it: when a kernel is decorated.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Of one kernel; shapes that never come back would fill the memory.
MOST_CALLS = 1_024

Grid: TypeAlias = "tuple[int, int, int]"


class _Binary(NamedTuple):
    """What a launch of a compiled kernel takes beside its arguments."""

    launch: Callable[..., None]
    head: tuple[Any, ...]
    """What stands between stream and arguments."""
    current_device: Callable[[], int]
    current_stream: Callable[[int], int]


class Launch(NamedTuple):
    """What was launched for a call, but its tensors."""

    binary: _Binary
    grid: Grid
    others: tuple[Any, ...]
    """The arguments after the tensors."""


class Launcher:
    """Launches one kernel; binaries are kept by what they were compiled for."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._binaries: dict[Hashable, _Binary] = {}
        self._calls: dict[Hashable, Launch] = {}

    def __call__(
        self,
        key: Hashable,
        grid: int | Grid,
        arguments: tuple[Any, ...],
        options: dict[str, int],
        *,
        call: Hashable = None,
        tensors: tuple[Tensor | None, ...] = (),
    ) -> None:
        """Launch `grid` programs on the current stream of the first argument's device.

        Args:
            key: Differs wherever Triton would compile anew: for other dtypes, constants,
                alignments or multiples of 16, or another device.
            grid: Number of programs, or of those in each of three dimensions.
            arguments: In the kernel's order, constants included; a tensor first.
            options: Triton's, such as `num_warps`.
            call: What `again` will be asked for; it decides all arguments but `tensors`.
            tensors: Those that `again` will be given. Where they are no longer the first arguments,
                as one had to be copied, the call is not kept.
        """
        grid = grid if isinstance(grid, tuple) else (grid, 1, 1)
        binary = self._binaries.get(key)
        if binary is None or _is_watched():
            with _on(arguments[0].get_device()):
                compiled = self._kernel[grid](*arguments, **options)
            # The interpreter has none.
            if compiled is not None:
                self._binaries[key] = _binary_of(compiled)
            return
        if call is not None and _are_same(tensors, arguments):
            if len(self._calls) >= MOST_CALLS:
                self._calls.clear()
            self._calls[call] = Launch(binary, grid, arguments[len(tensors) :])
        _launch(binary, grid, arguments)

    def again(self, call: Hashable, tensors: tuple[Tensor | None, ...]) -> bool:
        """Launch with these tensors as before for the same `call`; False: there was no such."""
        known = self._calls.get(call)
        if known is None or _is_watched():
            return False
        binary, grid, others = known
        _launch(binary, grid, tensors + others)
        return True

    def forget(self) -> None:
        """Drop all binaries and calls, as after what decides them has changed."""
        self._binaries.clear()
        self._calls.clear()


def _binary_of(compiled: Any) -> _Binary:
    active = driver.active
    told = active.get_current_device
    # The same without asking first whether CUDA has started, which it has.
    current_device = torch._C._cuda_getDevice if told is torch.cuda.current_device else told
    known = current_device, active.get_current_stream
    run, hooks = compiled.run, (compiled.packed_metadata, None, None, None)
    takes_scratch = not HAS_KNOWN_LAUNCHER or run.global_scratch_size or run.profile_scratch_size
    if takes_scratch:
        return _Binary(run, (compiled.function, *hooks), *known)
    options = run.launch_cooperative_grid, run.launch_pdl, None, None
    return _Binary(run.launch, (compiled.function, *options, *hooks), *known)


def _launch(binary: _Binary, grid: Grid, arguments: tuple[Any, ...]) -> None:
    launch, head, current_device, current_stream = binary
    device = arguments[0].get_device()
    if device == current_device():
        launch(*grid, current_stream(device), *head, *arguments)
        return
    with _on(device):
        launch(*grid, current_stream(device), *head, *arguments)


def _on(device: int) -> Any:
    """Make a device the current one: no driver takes a launch for another."""
    return nullcontext() if device < 0 else torch.cuda.device(device)


def _are_same(tensors: Sequence[Tensor | None], arguments: Sequence[Any]) -> bool:
    """Tell whether the arguments begin with these tensors, or others at the same addresses."""
    return all(
        ours is theirs or (ours is not None and ours.data_ptr() == theirs.data_ptr())
        for ours, theirs in zip(tensors, arguments, strict=False)
    )


def _is_watched() -> bool:
    """Tell whether a profiler of Triton's wants to hear of launches."""
    runtime = knobs.runtime
    try:
        return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
    except AttributeError:
        # No chain, which may be empty, but a hook or none: before Triton 3.5, or set so since.
        return runtime.launch_enter_hook is not None or runtime.launch_exit_hook is not None


def kind_of(*tensors: Tensor | None) -> Hashable:
    """Return all that a launch depends on of its inputs; the first one tells the device."""
    kind: list[Hashable] = []
    addresses = 0
    for tensor in tensors:
        if tensor is None:
            kind.append(None)
            continue
        addresses |= tensor.data_ptr()
        kind.append(tensor.dtype)
        kind.append(tensor.shape)
        if not tensor.is_contiguous():
            kind.append(tensor.stride())
    if addresses % ALIGNMENT:
        kind += (0 if one is None else one.data_ptr() % ALIGNMENT for one in tensors)
    kind.append(None if tensors[0] is None else tensors[0].get_device())
    return tuple(kind)


def alignments(tensors: Sequence[Tensor | None], *steps: int) -> int | tuple[bool | int, ...]:
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
