"""Measured ceilings of the GPU at hand: bandwidths, matrix rates and latencies."""

from __future__ import annotations

import datetime
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import quantiles
from typing import Any

from kprof.collect.ceilings import Ceilings, Figure
from kprof.collect.nvml import Nvml, describe_devices, read_sample, visible_devices
from kprof.errors import KprofError
from kprof.timing import captured, time_on_gpu

GIB = 1 << 30
DRAM_BYTES = 4 * GIB
L2_FOOTPRINTS_MIB = (4, 8, 16, 32, 64, 128)
# Copies within a footprint are timed at so many places, of which each has its own graph.
NUM_PLACES, COPIES_PER_GRAPH = 16, 20
MATRIX_SIZES = (4096, 8192, 16384)
NUM_LAUNCHES, NUM_ROUNDS = 2000, 3
# Read by Kineto whenever a trace stops.
DETACH = "TEARDOWN_CUPTI"


def measure_gpu() -> Ceilings:
    """Measure the current CUDA device; takes less than a minute and 13 GiB of its memory."""
    import torch

    if not torch.cuda.is_available():
        raise KprofError(
            "no CUDA device to measure",
            fix="run it on a GPU machine, in the environment that has the workload's torch",
        )
    nvml = Nvml()
    began = time.monotonic()
    index = torch.cuda.current_device()
    described = describe_devices(nvml)
    visible = visible_devices(described, os.environ)
    # CUDA counts the visible GPUs, NVML all.
    sensor = visible[index] if index < len(visible) else None
    before = _state(nvml, sensor)
    figures = _measure(torch)
    properties = torch.cuda.get_device_properties(index)
    ceilings = Ceilings(
        gpu=properties.name,
        driver=str(described[0].get("driver", "")) if described else "",
        date=datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        torch=str(torch.__version__),
        num_sms=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        took_s=time.monotonic() - began,
        before=before,
        after=_state(nvml, sensor),
        figures=figures,
        cache_bytes=getattr(properties, "L2_cache_size", None),
    )
    nvml.close()
    return ceilings


def _state(nvml: Nvml, index: int | None) -> dict[str, float]:
    """Return clocks, power and temperature now; empty where NVML cannot tell."""
    if index is None or index not in nvml.handles:
        return {}
    wanted = ("power_w", "sm_clock_mhz", "memory_clock_mhz", "temperature_c", "throttle_reasons")
    sample = read_sample(nvml, index)
    return {name: sample[name] for name in wanted if name in sample}


def _measure(torch: Any) -> tuple[Figure, ...]:  # noqa: ANN401
    """Measure part by part; a GPU that others fill cannot be measured."""
    parts = (_dram, _l2, _products, _latencies, _peer_to_peer, _all_reduce)
    figures, launches_ns = [], []
    try:
        for part in parts:
            for figure in part(torch):
                figures.append(figure)
                # The host is as fast as it can be for a second, then not for some.
                launches_ns.append(_launch_ns(torch))
        eager = Figure("launch eager", min(launches_ns), "ns", "add_ on one element, from Python")
        return (*figures, eager)
    except torch.cuda.OutOfMemoryError as error:
        raise KprofError(
            "the GPU has too little free memory to be measured: 13 GiB are needed",
            fix="stop what else runs on it; what it measures beside others is no ceiling anyway",
        ) from error


def _dram(torch: Any) -> Iterator[Figure]:  # noqa: ANN401
    """Measure traffic of arrays far larger than L2; a copy counts bytes read and written."""
    source = torch.randn(DRAM_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    works = (
        ("DRAM read", lambda: source.sum(), 1, "sum of 4 GiB"),
        ("DRAM write", lambda: target.fill_(1.5), 1, "fill of 4 GiB"),
        ("DRAM copy", lambda: target.copy_(source), 2, "copy of 4 GiB, read and written"),
    )
    for name, work, factor, detail in works:
        took = time_on_gpu(work)
        yield Figure(name, factor * DRAM_BYTES / took.median_ns * 1e9, "B/s", detail, took.spread)


def _l2(torch: Any) -> Iterator[Figure]:  # noqa: ANN401
    """Measure copies within small footprints, as the median over places all over the memory.

    A copy of microseconds differs by percents from place to place and from graph to graph.
    """
    places = torch.randn(DRAM_BYTES // 4, device="cuda").view(NUM_PLACES, -1)
    detail = f"read and written, median of {NUM_PLACES} places"
    for mib in L2_FOOTPRINTS_MIB:
        num_bytes = mib << 20
        pairs = places[:, : num_bytes // 4].unflatten(1, (2, -1))
        rates = [num_bytes / _copy_ns(source, target) * 1e9 for source, target in pairs]
        low, middle, high = quantiles(rates, n=4)
        yield Figure(f"L2 copy {mib} MiB", middle, "B/s", detail, (high - low) / middle)


def _copy_ns(source: Any, target: Any) -> float:  # noqa: ANN401
    """Return what a copy takes; replayed from a graph, so launches don't count."""
    replay = captured(partial(target.copy_, source), COPIES_PER_GRAPH)
    took = time_on_gpu(replay, num_samples=6, sample_ns=1e6, warm_up_s=0.01)
    return took.median_ns / COPIES_PER_GRAPH


def _products(torch: Any) -> Iterator[Figure]:  # noqa: ANN401
    """Measure square matrix products of random normal data by type and size."""
    for dtype in ("bf16", "fp16", "tf32", "fp8", "fp32"):
        for size in MATRIX_SIZES:
            if dtype == "fp32" and size > 8192:
                continue
            work = _product(torch, dtype, size)
            if work is None:
                continue
            # Under the power limit the clock swings by percents: a sample lasts several swings,
            # and the shortest products, which fill none so long, get more samples.
            num_samples = 36 if size == MATRIX_SIZES[0] else 12
            took = time_on_gpu(work, num_samples=num_samples, sample_ns=8e7)
            torch.backends.cuda.matmul.allow_tf32 = False
            rate = 2 * size**3 / took.median_ns * 1e9
            yield Figure(f"{dtype} {size}", rate, "FLOP/s", f"{size}³", took.spread)


def _product(torch: Any, dtype: str, size: int) -> Any:  # noqa: ANN401
    """Return a product to time, None where this GPU has no such type."""
    names = {"bf16": torch.bfloat16, "fp16": torch.float16}
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    a = torch.randn(size, size, device="cuda")
    b = torch.randn(size, size, device="cuda")
    if dtype == "fp8":
        if torch.cuda.get_device_capability() < (8, 9):
            return None
        one = torch.ones((), device="cuda")
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        return lambda: torch._scaled_mm(
            a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    a, b = a.to(names.get(dtype, torch.float32)), b.to(names.get(dtype, torch.float32))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _latencies(torch: Any) -> Iterator[Figure]:  # noqa: ANN401
    """Measure what the smallest launch costs between the nodes of a graph, and how long it runs."""
    one = torch.zeros(1, device="cuda")
    took = time_on_gpu(captured(lambda: one.add_(1), 200))
    yield Figure("launch in a graph", took.median_ns / 200, "ns", "from node to node", took.spread)
    shortest_ns = _shortest_kernel_ns(torch, one)
    if shortest_ns is not None:
        yield Figure("shortest kernel", shortest_ns, "ns", "as CUPTI times it")


def _shortest_kernel_ns(torch: Any, one: Any) -> float | None:  # noqa: ANN401
    """Return what CUPTI says, None where another profiler or the driver keeps it from that."""
    with warnings.catch_warnings(), _leaving_cupti(torch):
        warnings.simplefilter("ignore")  # about cycles, of which there is one
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(100):
                one.add_(1)
            torch.cuda.synchronize()
    times_us = [float(e.device_time) for e in profile.events() if e.device_time > 0]
    return min(times_us) * 1e3 if times_us else None


@contextmanager
def _leaving_cupti(torch: Any) -> Iterator[None]:  # noqa: ANN401
    """Let Kineto leave CUPTI where its trace stops: else every later launch would stay slower.

    Not before CUDA 12.6, where attaching once more may crash in CUDA graphs.
    """
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    if DETACH in os.environ or version < (12, 6):
        yield
        return
    os.environ[DETACH] = "1"
    try:
        yield
    finally:
        del os.environ[DETACH]


def _peer_to_peer(torch: Any) -> Iterator[Figure]:  # noqa: ANN401
    """Measure a copy to the next GPU, where there is one that can be reached."""
    if torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(0, 1):
        return
    source = torch.randn(GIB // 4, device="cuda:0")
    target = torch.empty(GIB // 4, device="cuda:1")
    took = time_on_gpu(lambda: target.copy_(source))
    yield Figure("peer copy", GIB / took.median_ns * 1e9, "B/s", "GPU 0 to 1", took.spread)


def _all_reduce(torch: Any) -> Iterator[Figure]:  # noqa: ANN401
    """Measure NCCL's sum over all visible GPUs, as bytes that each of them has to pass on."""
    count = torch.cuda.device_count()
    if count < 2 or not torch.cuda.nccl.is_available([torch.empty(1, device="cuda")]):
        return
    each = [torch.randn(GIB // 8, device=f"cuda:{index}") for index in range(count)]
    results = [torch.empty_like(one) for one in each]
    num_bytes = 2 * (count - 1) / count * each[0].nbytes
    took = time_on_gpu(lambda: torch.cuda.nccl.all_reduce(each, results))
    detail = f"NCCL, {count} GPUs, 512 MiB each, bytes on the bus"
    yield Figure("all-reduce", num_bytes / took.median_ns * 1e9, "B/s", detail, took.spread)


def _launch_ns(torch: Any) -> float:  # noqa: ANN401
    """Return what the smallest launch costs the host now; the best of a few rounds."""
    one = torch.zeros(1, device="cuda")
    times = []
    for _ in range(NUM_ROUNDS):
        torch.cuda.synchronize()
        began_ns = time.perf_counter_ns()
        for _ in range(NUM_LAUNCHES):
            one.add_(1)
        torch.cuda.synchronize()
        times.append((time.perf_counter_ns() - began_ns) / NUM_LAUNCHES)
    return min(times)
