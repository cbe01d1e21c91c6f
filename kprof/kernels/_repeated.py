"""Calls that are made again, in C: one kernel launched on other tensors of the same kind.

What a call depends on is compared at once, by what torch compiles its own guards to; results are
made, and the driver is called, without a step in Python. Whatever differs, or cannot be had, is
left to the caller, which does the same the long way.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeAlias

import torch
import triton
from torch import Tensor
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._autograd import _profiler_enabled
from torch.autograd import forward_ad
from triton import knobs
from triton.runtime import driver

from kprof.kernels._repeated_source import SOURCE

# Whose launcher hands over parameters as `_parameters` does, and after them two scratch buffers.
HAS_KNOWN_LAUNCHER = triton.__version__.startswith("3.6.")
ALIGNMENT = 16
# Of Triton's types, as `struct` packs them.
FORMATS = dict(zip(("i1", "i8", "i16", "i32", "i64"), "bbhiq", strict=True))
FORMATS |= dict(zip(("u1", "u8", "u16", "u32", "u64"), "BBHIQ", strict=True))
FORMATS |= {"fp32": "f", "f32": "f", "fp64": "d"}
# While one of these tells something true, the dispatcher does more than call the implementation.
# Transforms, tracers, autocast and wanted gradients are in what tensors are compared by.
QUIET = (_len_torch_dispatch_stack, _len_torch_function_stack, _profiler_enabled)
PLAIN_VALUES = (type(None), bool, int, float, str)
NUM_SCRATCH, MOST_PARAMETERS = 2, 64
NOTHING, ONE, LIST, TUPLE = range(4)

Again: TypeAlias = "Callable[..., Any]"
"""Takes arguments like those it was made from, and returns results like theirs.

NotImplemented: the arguments are of another kind, or the driver refuses; nothing was launched.
"""


def launch_again(
    compiled: Any, grid: tuple[int, int, int], launched: tuple[Any, ...], num_tensors: int
) -> Again | None:
    """Return what repeats a launch on other tensors, of which the caller knows that they fit.

    Args:
        compiled: Triton's binary.
        grid: How many programs were launched of it, in each dimension.
        launched: What it was given, in the kernel's order, constants included.
        num_tensors: How many of them, the first ones, there will be others of.
    """
    places = {place: place for place in range(num_tensors)}
    return _prepared(compiled, grid, launched, places, launched[:num_tensors])


def call_again(
    compiled: Any,
    grid: tuple[int, int, int],
    launched: tuple[Any, ...],
    arguments: tuple[Any, ...],
    results: Any,
) -> Again | None:
    """Return what repeats a call, which made its results, launched this, and did nothing else.

    Args:
        compiled: Triton's binary.
        grid: How many programs were launched of it, in each dimension.
        launched: What it was given, in the kernel's order, constants included.
        arguments: Of the call: tensors, among them all that were launched and are no results; and
            values.
        results: Nothing, a tensor, or a list or tuple of them, all of which the kernel wrote.
    """
    made = [results] if isinstance(results, Tensor) else list(results or ())
    everything = (*arguments, *made)
    ids = [id(one) for one in everything if isinstance(one, Tensor)]
    values = [one for one in arguments if not isinstance(one, Tensor)]
    at = {id(one): place for place, one in enumerate(everything) if isinstance(one, Tensor)}
    places = {index: at[id(one)] for index, one in enumerate(launched) if id(one) in at}
    if (
        len(at) < len(ids)
        or any(type(one) not in PLAIN_VALUES for one in values)
        or any(not isinstance(one, Tensor) or id(one) not in map(id, launched) for one in made)
    ):
        return None
    check, hooks = _check([one for one in arguments if isinstance(one, Tensor)]), _hooks()
    if check is None or hooks is None:
        return None
    guards = QUIET, hooks, check
    return _prepared(compiled, grid, launched, places, arguments, results, made, guards)


def _prepared(
    compiled: Any,
    grid: tuple[int, int, int],
    launched: tuple[Any, ...],
    places: Mapping[int, int],
    arguments: tuple[Any, ...],
    results: Any = None,
    made: Sequence[Tensor] = (),
    guards: tuple[Any, ...] = ((), (), None),
) -> Again | None:
    prepare = _prepare() if _is_plain(compiled) else None
    parameters = None if prepare is None else _parameters(compiled, launched, places)
    if prepare is None or parameters is None:
        return None
    active, (num_warps, _, shared) = driver.active, compiled.packed_metadata
    form = {type(None): NOTHING, list: LIST, tuple: TUPLE}.get(type(results), ONE)
    again: Again = prepare(
        *(_driver_launch(), compiled.function, grid, 32 * num_warps, shared, *parameters),
        *(Tensor.data_ptr, launched[0].get_device()),
        *(current_device_of(active), active.get_current_stream),
        tuple(... if isinstance(one, Tensor) else one for one in arguments),
        *guards,
        tuple(_maker(one) for one in made),
        form,
    )
    return again


def current_device_of(active: Any) -> Callable[[], int]:
    """Return what tells the current device of Triton's active driver."""
    told: Callable[[], int] = active.get_current_device
    # The same without asking first whether CUDA has started, which it has.
    return torch._C._cuda_getDevice if told is torch.cuda.current_device else told


def _is_plain(compiled: Any) -> bool:
    """Tell whether a launch is nothing but a grid of programs, by the launcher that is known."""
    if not HAS_KNOWN_LAUNCHER or torch.version.hip is not None:
        return False
    from triton.backends.nvidia.driver import CudaLauncher

    run = compiled.run
    if type(run) is not CudaLauncher:
        return False
    wants = run.global_scratch_size, run.profile_scratch_size, run.launch_cooperative_grid
    return not any((*wants, run.launch_pdl)) and compiled.packed_metadata[1] == 1


def _parameters(
    compiled: Any, launched: tuple[Any, ...], places: Mapping[int, int]
) -> tuple[bytes, bytes, bytes] | None:
    """Return of every parameter its value, where it comes from, and how far it is from aligned."""
    values, sources, offsets = b"", [], []
    kinds = compiled.src.signature.values()
    if len(kinds) != len(launched):
        return None
    for index, (kind, one) in enumerate(zip(kinds, launched, strict=True)):
        is_tensor = isinstance(one, Tensor)
        if kind == "constexpr":
            continue
        if is_tensor != (kind[0] == "*") or is_tensor != (index in places):
            return None
        try:
            value = b"" if is_tensor else struct.pack(FORMATS[kind], one)
        except (KeyError, struct.error):
            return None
        values += value.ljust(8, b"\0")
        sources.append(places.get(index, -1))
        offsets.append(one.data_ptr() % ALIGNMENT if is_tensor else 0)
    if len(sources) + NUM_SCRATCH > MOST_PARAMETERS:
        return None
    sources += NUM_SCRATCH * [-1]
    all_sources = struct.pack(f"{len(sources)}b", *sources)
    return values + bytes(8 * NUM_SCRATCH), all_sources, bytes(offsets + NUM_SCRATCH * [0])


def _hooks() -> tuple[tuple[Any, str, Any, list[Any]], ...] | None:
    """Return what is looked up in every call, and what it is while a call is nothing but a launch.

    That are Triton's hooks of launches, which tell nobody, and torch's level of derivatives in
    forward mode, which is outside of all.
    """
    runtime, names = knobs.runtime, ("launch_enter_hook", "launch_exit_hook")
    chains = [(runtime, name, getattr(runtime, name)) for name in names]
    if any(getattr(chain, "calls", None) != [] for _, _, chain in chains):
        return None
    forward: tuple[Any, str, Any, list[Any]] = forward_ad, "_current_level", -1, []
    return *((*one, one[-1].calls) for one in chains), forward


def _check(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """Return what tells whether tensors are like these to torch; None: this torch has no such.

    It compares types, dtypes, devices, shapes and strides, whether gradients are wanted, and what
    the dispatcher would do: for modes, transforms and tracers, too.
    """
    try:
        check: Callable[..., bool] = torch._C._dynamo.guards.TensorGuards(
            *tensors,
            dynamic_dims_sizes=[list(one.shape) for one in tensors],
            dynamic_dims_strides=[list(one.stride()) for one in tensors],
        ).check
        return check if check(*tensors) else None
    except (AttributeError, TypeError, ValueError, SystemError):
        return None


def _maker(result: Tensor) -> Callable[[], Tensor]:
    """Return what makes an empty tensor like this: as compiled code of torch does, where it can."""
    size, stride = tuple(result.shape), result.stride()
    quick = getattr(torch._C._dynamo.guards, f"_empty_strided_{result.device.type}", None)
    if quick is not None:
        return partial(quick, size, stride, result.dtype)
    about = {"dtype": result.dtype, "device": result.device}
    return partial(torch.empty_strided, size, stride, **about)


@cache
def _prepare() -> Callable[..., Again] | None:
    """Compile the source, with what Triton compiles its own launchers with, or find it done."""
    try:
        from triton.runtime.build import compile_module_from_src

        module = compile_module_from_src(src=SOURCE, name="kprof_repeated")
    except (RuntimeError, OSError, ImportError, subprocess.SubprocessError):
        return None
    prepare: Callable[..., Again] = module.prepare
    return prepare


@cache
def _driver_launch() -> int:
    """Return the address of the driver's function."""
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)
