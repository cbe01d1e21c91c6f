"""The running of Triton kernels: operators of torch, launches, the layout of their tensors.

`define` registers an operator of torch; `applied` gives it gradients. `Launcher` launches its
kernel. Triton inspects every argument of every launch to find the compiled binary, which takes
longer than many kernels run. Here the caller passes a key of what the binary depends on, and
`Launcher.again` repeats an earlier launch with other tensors. `rows_of` and `tile_of` lay out
tensors as rows. `build_beside` shortens the first launch: it builds Triton's launchers in threads
while the kernels compile.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import torch
import triton
from torch import Tensor, is_grad_enabled
from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from triton import knobs
from triton.runtime import JITFunction, driver
from triton.runtime.jit import compute_cache_key

from kprof.errors import KprofError

ALIGNMENT = 16
"""Bytes of an address, or elements of a stride: Triton compiles a faster binary for multiples."""
HAS_KNOWN_LAUNCHER = triton.__version__.startswith("3.6.")
"""Whether Triton's launcher takes arguments in the order in which `_binary_of` passes them."""
# Triton reads this variable when a kernel is decorated.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Per kernel: shapes that never recur would fill the memory.
MOST_CALLS = 1_024

Grid: TypeAlias = "tuple[int, int, int]"


class _Binary(NamedTuple):
    """A compiled kernel, and the arguments of its launch that are always the same."""

    launch: Callable[..., None]
    head: tuple[Any, ...]
    """Arguments of the launch between the stream and those of the kernel."""
    current_device: Callable[[], int]
    current_stream: Callable[[int], int]


class Launch(NamedTuple):
    """A past launch, without its tensors."""

    binary: _Binary
    grid: Grid
    others: tuple[Any, ...]
    """The arguments after the tensors."""

    def repeat(self, tensors: tuple[Tensor | None, ...]) -> None:
        """Launch again, with these tensors."""
        _launch(self.binary, self.grid, tensors + self.others)


class Launcher:
    """Launches one kernel; caches its binaries by key, and its launches by call."""

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
        """Launch `grid` CTAs on the current stream of the first argument's device.

        Args:
            key: Differs wherever Triton would compile another binary: dtypes, constants,
                alignments, multiples of 16, device.
            grid: Number of CTAs, or the number in each of three dimensions.
            arguments: In the kernel's order, constants included; a tensor first.
            options: Triton's, such as `num_warps`.
            call: The key for `again`; it determines all arguments except `tensors`.
            tensors: The tensors that `again` replaces. If they are not the first arguments, because
                one had to be copied, the launch is not cached.
        """
        grid = grid if isinstance(grid, tuple) else (grid, 1, 1)
        binary = self._binaries.get(key)
        if binary is None or _is_watched():
            with _on(arguments[0].get_device()):
                compiled = self._kernel[grid](*arguments, **options)
            # The interpreter returns None.
            if compiled is not None:
                self._binaries[key] = _binary_of(compiled)
            return
        if call is not None and _are_same(tensors, arguments):
            if len(self._calls) >= MOST_CALLS:
                self._calls.clear()
            self._calls[call] = Launch(binary, grid, arguments[len(tensors) :])
        _launch(binary, grid, arguments)

    def again(self, call: Hashable, tensors: tuple[Tensor | None, ...]) -> bool:
        """Repeat the launch of the same `call` with these tensors; False: there was none."""
        known = self.find(call)
        if known is None:
            return False
        known.repeat(tensors)
        return True

    def find(self, call: Hashable) -> Launch | None:
        """Return the launch of the same `call`; None: there was none."""
        known = self._calls.get(call)
        return None if known is None or _is_watched() else known

    def forget(self) -> None:
        """Drop all cached binaries and launches."""
        self._binaries.clear()
        self._calls.clear()


def _binary_of(compiled: Any) -> _Binary:
    active = driver.active
    told = active.get_current_device
    # The same function without the check whether CUDA is initialised.
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
    """Make a device the current one: CUDA launches on the current device only."""
    return nullcontext() if device < 0 else torch.cuda.device(device)


def _are_same(tensors: Sequence[Tensor | None], arguments: Sequence[Any]) -> bool:
    """Return whether the arguments begin with these tensors, or with tensors at their addresses."""
    return all(
        ours is theirs or (ours is not None and ours.data_ptr() == theirs.data_ptr())
        for ours, theirs in zip(tensors, arguments, strict=False)
    )


def _is_watched() -> bool:
    """Return whether a launch hook of Triton, such as Proton's, is installed."""
    runtime = knobs.runtime
    try:
        return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
    except AttributeError:
        # Before Triton 3.5 the attribute is a hook or None instead of a chain of hooks.
        return runtime.launch_enter_hook is not None or runtime.launch_exit_hook is not None


def kind_of(*tensors: Tensor | None) -> Hashable:
    """Return everything about the inputs that a launch depends on; the first one has the device."""
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
    """Return the alignments for which Triton specialises a binary; 0 if everything is aligned.

    Otherwise the result tells for each tensor and stride whether it is aligned, and whether a
    stride is 1, which is a constant to Triton.
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
    """Return the smallest power of two that is not smaller than a number."""
    return 1 << max(number - 1, 0).bit_length()


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Two 16-byte loads per thread: more would spill the other values of a thread.
ELEMENTS_PER_WARP = 512
MOST_WARPS = 32
SMS_WITHOUT_GPU = 4


def rows_of(x: Tensor) -> tuple[Tensor, int]:
    """Return a tensor as a matrix of rows, and its row stride in elements.

    It is a copy only if columns are not contiguous, or rows are not equally spaced.
    """
    if x.is_contiguous():
        return x, x.shape[-1]
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    return rows, rows.stride(0)


def count_rows(x: Tensor) -> int:
    """Return the number of rows; 0 if the rows have no columns."""
    return x.numel() // x.shape[-1] if x.shape[-1] else 0


def empty_like(x: Tensor) -> Tensor:
    """Return a new contiguous tensor of the same shape and dtype."""
    # The memory format is an argument only where needed: it costs time, and `torch.empty` more.
    if x.is_contiguous():
        return torch.empty_like(x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a new contiguous tensor; `torch.empty` takes longer to read its arguments."""
    return torch.empty_strided(shape, _strides_of(shape), dtype=dtype, device=device)


@functools.lru_cache(MOST_CALLS)
def _strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@functools.cache
def tile_of(columns: int, elements: int) -> tuple[int, int, int]:
    """Return rows per CTA, columns per block and warps, for CTAs of so many elements.

    They depend on the columns alone, so that the number of rows changes no row's summation order.
    """
    block = next_power_of_two(columns)
    rows = max(1, elements // block)
    return rows, block, min(MOST_WARPS, max(1, rows * block // ELEMENTS_PER_WARP))


def is_widened(x: Tensor) -> bool:
    """Return whether autocast is on, under which torch computes norms and softmax in float32."""
    return x.dtype != torch.float32 and torch.is_autocast_enabled(x.device.type)


@functools.cache
def num_sms(device: torch.device) -> int:
    """Return the number of SMs; a constant for a device that is no GPU."""
    if device.type != "cuda":
        return SMS_WITHOUT_GPU
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


NAMESPACE = "kprof"
PLAIN = frozenset((Tensor, torch.nn.Parameter))
_library = torch.library.Library(NAMESPACE, "DEF")


class DifferentiationError(KprofError):
    """A derivative that the operators do not have, and that would silently be 0."""


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register an operator of torch, and return a function that calls it.

    The function skips torch's dispatcher where the dispatcher would only call `run`. This costs
    several microseconds less per call than `torch.library.custom_op`.

    Args:
        schema: As torch writes it, such as "silu(Tensor x) -> Tensor".
        run: The implementation on CUDA; on a CPU it needs Triton's interpreter.
        fake: Returns empty outputs of the right shapes, from inputs without data.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    for key in ("CUDA", "CPU"):
        _library.impl(name, run, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default
    num_tensors = _count_tensors(operator)
    if num_tensors is None:
        return cast("Callable[..., Any]", operator)

    def call(*arguments: Any) -> Any:
        if is_compiling():
            _refuse_forward_mode()
            return operator(*arguments)
        if _is_dispatched(arguments[:num_tensors]):
            return operator(*arguments)
        return run(*arguments)

    return call


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return a function that applies an autograd function without the checks of `apply`.

    Its gradients are not differentiable: a graph of them raises DifferentiationError.
    """
    function.backward = staticmethod(_last(function.backward))
    run = super(torch.autograd.Function, function).apply

    def call(*arguments: Any) -> Any:
        if is_compiling() or peek_interpreter_stack() is not None:
            return function.apply(*arguments)
        return run(*arguments)

    return call


def _last(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backward pass that raises if it is to be differentiated itself."""

    def run(ctx: Any, *gradients: Tensor | None) -> Any:
        if is_grad_enabled() and not is_compiling():
            raise DifferentiationError(
                "this kernel has no gradient of its gradient",
                fix="leave out create_graph=True, or leave the original in its place",
            )
        return backward(ctx, *gradients)

    return run


def needs_gradient(*tensors: Tensor) -> bool:
    """Return whether a gradient of one of these tensors is being recorded."""
    return is_grad_enabled() and any(one.requires_grad for one in tensors)


def refuse_gradients(what: str, *tensors: Tensor) -> None:
    """Raise where gradients are recorded, for a kernel without a backward pass.

    Raises:
        DifferentiationError: one of the tensors needs a gradient.
    """
    if needs_gradient(*tensors):
        raise DifferentiationError(f"{what} has no gradients", fix="call it within torch.no_grad()")


def is_forward_mode() -> bool:
    """Return whether derivatives are computed in forward mode."""
    return forward_ad._current_level >= 0


def _refuse_forward_mode() -> None:
    if is_forward_mode():
        raise DifferentiationError(
            "this kernel has no derivative in forward mode",
            fix="differentiate backwards, or leave the original in its place",
        )


def _has_derivative(tensor: Tensor | None) -> bool:
    return tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None


def _count_tensors(operator: Any) -> int | None:
    """Return how many leading arguments are tensors; None if others are, or if one is a list."""
    types = [str(one.type) for one in operator._schema.arguments]
    count = next((i for i, one in enumerate(types) if "Tensor" not in one), len(types))
    if any("Tensor" in one for one in types[count:]) or any("List" in one for one in types[:count]):
        return None
    return count


def _is_dispatched(tensors: tuple[Tensor | None, ...]) -> bool:
    """Return whether the dispatcher would do more than call the implementation.

    It does more where gradients are recorded; where a mode, a transform, a tracer or a profiler is
    active; and for tensor subclasses.

    Raises:
        DifferentiationError: a tensor has a forward-mode derivative, which the results would lack.
    """
    # Without a call of `is_forward_mode`, and cheap tests first: this runs at every launch.
    if forward_ad._current_level >= 0 and any(_has_derivative(one) for one in tensors):
        _refuse_forward_mode()
    if (
        _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or _get_tracing_state() is not None
        or peek_interpreter_stack() is not None
        or _profiler_enabled()
    ):
        return True
    wants_gradients = is_grad_enabled()
    for one in tensors:
        if one is not None and (
            type(one) not in PLAIN
            or (wants_gradients and one.requires_grad)
            or one.is_meta
            or one.is_neg()
        ):
            return True
    return False


class _State(threading.local):
    is_compiling = False


_here = _State()
# Kernels whose launchers are built in threads.
_hooked: set[int] = set()


def build_beside() -> None:
    """From now on, build the launchers of all kernels imported so far in threads.

    Triton compiles a C launcher for each signature once per machine, after the kernel. That takes
    longer than most kernels take to compile. The signature is known earlier, so the launcher is
    built while the kernel compiles, and put where Triton looks for it.
    """
    if not HAS_KNOWN_LAUNCHER or torch.version.hip is not None:
        return
    for name, module in [*sys.modules.items()]:
        if name.startswith("kprof.kernels."):
            for one in [*vars(module).values()]:
                # Each kernel once: where it is defined, not where it is imported.
                if isinstance(one, JITFunction) and one.module == name and id(one) not in _hooked:
                    _hooked.add(id(one))
                    one.add_pre_run_hook(partial(_build_for, one))


def _build_for(kernel: Any, *arguments: Any, **options: Any) -> None:
    """Compile a kernel for a call, unless it is compiled, and build its launcher meanwhile."""
    # An error here occurs again where Triton does the same, and is raised there.
    with suppress(Exception):
        compiled, keys, _, _, bind = kernel.device_caches[driver.active.get_current_device()]
        _, given, decided = bind(*arguments, **options)
        kinds = [kind for kind, _ in given]
        # The types of TMA descriptors are known only after the kernel is compiled.
        is_known = not any("tensordesc" in str(kind) for kind in kinds)
        is_compiled = _here.is_compiling or compute_cache_key(keys, given, decided) in compiled
        if is_known and not is_compiled:
            thread = _start(_build, kinds)
            _here.is_compiling = True
            try:
                kernel.warmup(*arguments, grid=(1,), **options)
            finally:
                _here.is_compiling = False
            thread.join()


def _start(work: Callable[..., object], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=_quietly, args=(work, *arguments), daemon=True)
    thread.start()
    return thread


def _quietly(work: Callable[..., object], *arguments: object) -> None:
    with suppress(Exception):
        work(*arguments)


def _build(kinds: list[Any]) -> None:
    """Build the launcher for arguments of these types as Triton does, unless it exists."""
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime.build import compile_module_from_src

    compile_module_from_src(
        src=nvidia.make_launcher({}, dict(enumerate(kinds)), None),
        name="__triton_launcher",
        library_dirs=nvidia.library_dirs(),
        include_dirs=nvidia.include_dirs,
        libraries=nvidia.libraries,
    )
