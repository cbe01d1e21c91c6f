"""The bench: GPU time, host time of each provider of a kernel, beside a copy of the same bytes.

GPU time is of a CUDA graph replay over sets of inputs that together are several times larger than
L2, so that no data is cached and no launch delays it. Host time of a call is measured apart. Every
provider runs on the same random data: forward, backward, or both.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from kprof.kernels import OURS, Kernel, Provider, Shape, Work
from kprof.kernels.bench.choice import Pass, Timed
from kprof.kernels.correctness import Case, Subject
from kprof.kernels.correctness.inputs import Draw
from kprof.timing import captured, time_on_gpu


def pass_of(
    kernel: Kernel, function: Callable[..., Any], sets: list[tuple[Any, ...]], direction: Pass
) -> Callable[[], None]:
    """Return a function that runs one pass, on the next of the sets of arguments at each call."""
    make = {"forward": _forward, "backward": _backward, "training": _training}[direction]
    return make(kernel, function, sets)


def _forward(
    kernel: Kernel, function: Callable[..., Any], sets: list[tuple[Any, ...]]
) -> Callable[[], None]:
    turns = cycle(sets)

    def run() -> None:
        with torch.no_grad():
            function(*next(turns))

    return run


def _backward(
    kernel: Kernel, function: Callable[..., Any], sets: list[tuple[Any, ...]]
) -> Callable[[], None]:
    """Return the backward pass alone; the forward passes run at its first call.

    Autograd launches on the stream of the forward pass, which has to be the caller's.
    """
    done: dict[int, Iterator[Any]] = {}

    def run() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        if stream not in done:
            done.clear()
            done[stream] = cycle([_with_graph(kernel, function, one) for one in sets])
        outputs, inputs, gradients = next(done[stream])
        torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)

    return run


def _training(
    kernel: Kernel, function: Callable[..., Any], sets: list[tuple[Any, ...]]
) -> Callable[[], None]:
    turns = cycle(sets)
    gradients: list[Any] = []

    def run() -> None:
        outputs, inputs, drawn = _with_graph(kernel, function, next(turns), gradients)
        torch.autograd.grad(outputs, inputs, drawn)

    return run


def _with_graph(
    kernel: Kernel,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    kept: list[Any] | None = None,
) -> tuple[Any, tuple[Any, ...], Any]:
    """Return results of a forward pass, the inputs with gradients, and gradients of the results.

    Gradients of results are drawn once and `kept`; the gradient of a loss is 1.
    """
    inputs = tuple(arguments[i].requires_grad_() for i in kernel.differentiable)
    output = function(*arguments)
    outputs = output if isinstance(output, tuple) else (output,)
    outputs = tuple(one for one in outputs if one.requires_grad)
    gradients = kept if kept is not None else []
    if not gradients:
        drawn = (torch.randn_like(one) if one.dim() else torch.ones_like(one) for one in outputs)
        gradients.extend(drawn)
    return outputs, inputs, tuple(gradients)


def subject_of(kernel: Kernel, provider: str = OURS, device: str = "cpu") -> Subject:
    """Return the gate's subject: this provider in place of the reference."""
    by = kernel.provider(provider)
    return Subject(
        name=f"{kernel.name} by {provider}",
        replaced=kernel.reference,
        new=by.load(),
        truth=kernel.truth,
        inputs=kernel.inputs,
        shapes=kernel.edges,
        free=kernel.free,
        reach=kernel.reach,
        refuses=kernel.refuses if provider.startswith(OURS) else None,
        dtypes=kernel.dtypes,
        device=device,
        differentiable=kernel.differentiable,
        writes=kernel.writes,
        rows=kernel.rows,
        constant=kernel.constant,
        precision="same" if kernel.stated_error is None else "lower",
        stated_error=kernel.stated_error,
        is_deterministic=by.repeats,
        is_batch_invariant=bool(kernel.rows) and not by.is_varying,
        has_free_strides=kernel.has_free_strides,
    )


# Size of all sets of inputs together, in multiples of L2.
BEYOND_L2 = 4
MOST_SETS = 32
HOST_CALLS = 200
# Elements of the smallest dtype in 16 bytes.
ELEMENTS = 16
# Short: the measurement before has kept the clocks up.
WARM_UP_S = 0.15
MOST_COMPILED = 128


class DrawOnDevice(Draw):
    """Draws random values on the device: the host would take minutes for gigabytes."""

    def __init__(self, case: Case, subject: Subject) -> None:
        super().__init__(case, subject)
        self._generator = torch.Generator(subject.device).manual_seed(case.seed)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Return integers from 0 to below `high`."""
        device = self.subject.device
        return torch.randint(high, shape, generator=self._generator, device=device)

    def _normal(self, shape: Shape) -> Tensor:
        device = self.subject.device
        return torch.randn(shape, generator=self._generator, device=device)


def bench(
    kernel: Kernel,
    shape: Shape,
    dtype: str,
    direction: Pass = "forward",
    providers: Sequence[Provider] | None = None,
    *,
    is_in_graph: bool = True,
    copy_ns: float | None = None,
) -> Iterator[Timed]:
    """Yield the times of every provider of a kernel that is installed, on one shape.

    Args:
        kernel: The operation.
        shape: Of its inputs.
        dtype: Of its inputs.
        direction: The pass.
        providers: Those to measure; None: all.
        is_in_graph: Whether calls are captured in a CUDA graph. Some providers wait for the GPU,
            which breaks a capture; after that, the process can draw no random values.
        copy_ns: Time of a copy of the same bytes, if it is known.
    """
    for provider in kernel.providers if providers is None else providers:
        about = (kernel.name, provider.name, shape, dtype, direction)
        try:
            function = provider.load()
        except ImportError as error:
            yield Timed(*about, problem=f"not installed: {error}")
            continue
        try:
            with _compiling_each_shape():
                timed = _measure(kernel, function, about, copy_ns, is_in_graph)
            copy_ns = timed.copy_ns
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            # A limit of a peer is not a failure of the bench.
            timed = Timed(*about, problem=f"{type(error).__name__}: {error}")
        # Graphs hold their memory until they are deleted.
        gc.collect()
        torch.cuda.empty_cache()
        yield timed


def run_once(kernel: Kernel, provider: Provider, shape: Shape, dtype: str, direction: Pass) -> None:
    """Run each part of `bench` once for a provider, so that it is compiled."""
    function = provider.load()
    with _compiling_each_shape():
        pass_of(kernel, function, [_drawn(kernel, shape, dtype)], direction)()
        if direction == "forward":
            with torch.no_grad():
                function(*_drawn(kernel, small_shape(kernel), dtype))
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()


def _compiling_each_shape() -> AbstractContextManager[None]:
    """Let torch compile for every shape; by default it falls back to eager after eight."""
    import torch._dynamo.config as settings

    # The second is its name before torch 2.6.
    name = "recompile_limit" if hasattr(settings, "recompile_limit") else "cache_size_limit"
    patched: AbstractContextManager[None] = settings.patch({name: MOST_COMPILED})
    return patched


def _measure(
    kernel: Kernel,
    function: Callable[..., Any],
    about: tuple[str, str, Shape, str, Pass],
    copy_ns: float | None,
    is_in_graph: bool,
) -> Timed:
    _, _, shape, dtype, direction = about
    sets = _inputs(kernel, shape, dtype)
    work = _work_of(kernel, sets[0], direction)
    run = pass_of(kernel, function, sets, direction)
    # Values that are cached per argument, such as FP8 weights, are not part of a call.
    for _ in sets:
        run()
    extra_bytes = _extra_bytes(run)
    calls = len(sets) if is_in_graph else 1
    timed = captured(run, calls) if is_in_graph else run
    took = time_on_gpu(timed, warm_up_s=WARM_UP_S)
    gpu_ns = took.median_ns / calls
    if copy_ns is None:
        copy_ns = copy_time_ns(work.bytes)
    return Timed(
        *about,
        gpu_ns=gpu_ns,
        spread=took.spread,
        host_ns=_host_time_ns(kernel, function, dtype) if direction == "forward" else None,
        bytes_per_s=work.bytes / gpu_ns * 1e9,
        share_of_copy=copy_ns / gpu_ns,
        flops_per_s=work.flops / gpu_ns * 1e9,
        extra_bytes=extra_bytes,
        copy_ns=copy_ns,
        is_in_graph=is_in_graph,
    )


def _work_of(kernel: Kernel, arguments: tuple[Any, ...], direction: Pass) -> Work:
    forward = kernel.work(*arguments)
    if direction == "forward":
        return forward
    if kernel.backward_work is None:
        raise ValueError(f"{kernel.name} has no backward pass")
    backward = kernel.backward_work(*arguments)
    if direction == "backward":
        return backward
    return Work(forward.flops + backward.flops, forward.bytes + backward.bytes)


def _extra_bytes(run: Callable[[], None]) -> int:
    """Return the peak memory of one call; the first call, which compiles, does not count."""
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def copy_time_ns(num_bytes: int) -> float:
    """Return the time of a copy that reads half of `num_bytes` and writes the other half.

    It is the faster of two: the driver's copy, which is slow for some sizes, and a kernel.
    """
    size, num_sets = max(num_bytes // 4, 1), _num_sets(num_bytes)
    sources = [torch.randn(size, device="cuda").bfloat16() for _ in range(num_sets)]
    pairs = [(source, torch.empty_like(source)) for source in sources]
    by_driver, by_kernel = cycle(pairs), cycle(pairs)

    def copy() -> None:
        source, target = next(by_driver)
        target.copy_(source)

    def negate() -> None:
        source, target = next(by_kernel)
        torch.neg(source, out=target)

    times = [time_on_gpu(captured(work, num_sets)).median_ns for work in (copy, negate)]
    return min(times) / num_sets


def _inputs(kernel: Kernel, shape: Shape, dtype: str) -> list[tuple[Any, ...]]:
    """Return as many random sets of arguments as exceed L2."""
    first = _drawn(kernel, shape, dtype)
    num_sets = _num_sets(kernel.work(*first).bytes)
    return [first, *(_drawn(kernel, shape, dtype, seed) for seed in range(1, num_sets))]


def _drawn(kernel: Kernel, shape: Shape, dtype: str, seed: int = 0) -> tuple[Any, ...]:
    case = Case(shape, dtype, seed=seed)
    return kernel.inputs(shape, DrawOnDevice(case, subject_of(kernel, device="cuda")))


def _num_sets(num_bytes: int) -> int:
    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return min(MOST_SETS, max(2, -(-BEYOND_L2 * l2 // max(num_bytes, 1))))


def small_shape(kernel: Kernel) -> Shape:
    """Return a shape whose calls do not wait for the GPU; of whole vectors, for some peers."""
    shapes = kernel.edges or kernel.shapes
    return min(shapes, key=lambda shape: (shape[-1] % ELEMENTS != 0, math.prod(shape)))


def _host_time_ns(kernel: Kernel, function: Callable[..., Any], dtype: str) -> float:
    """Return the host time of a call, from many small ones in a row."""
    arguments = _drawn(kernel, small_shape(kernel), dtype)
    times = []
    with torch.no_grad():
        for _ in range(5):
            torch.cuda.synchronize()
            began_ns = time.perf_counter_ns()
            for _ in range(HOST_CALLS):
                function(*arguments)
            times.append((time.perf_counter_ns() - began_ns) / HOST_CALLS)
    torch.cuda.synchronize()
    return min(times)
