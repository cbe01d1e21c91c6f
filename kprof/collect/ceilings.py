"""Ceilings measured on the machine at hand; so far those of the host."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from kprof.device import Device

COPY_BYTES = 256 << 20
MATRIX_SIZE = 2048
REPEATS = 4


FILE = "ceilings.json"


def keep_host_ceilings(raw: Path) -> Device:
    """Measure this host and leave the figures beside the recording, for whoever opens it later."""
    device = measure_host()
    (raw / FILE).write_bytes(msgspec.json.encode(device))
    return device


def kept_ceilings(raw: Path) -> Device | None:
    """Return the ceilings that were measured with a recording, or None."""
    try:
        return msgspec.json.decode((raw / FILE).read_bytes(), type=Device)
    except FileNotFoundError:
        return None


def measure_host() -> Device:
    """Measure the host's copy bandwidth and fp32 matrix rate; takes about half a second.

    Bytes are those read and written by a copy of one large array, a piece by each core; flops
    those of a square fp32 product through numpy's BLAS. The best of four counts.
    """
    rng = np.random.default_rng(0)
    source = np.empty(COPY_BYTES // 8)
    source.fill(1.0)
    target = np.empty_like(source)
    matrix = rng.standard_normal((MATRIX_SIZE, MATRIX_SIZE), dtype=np.float32)
    num_cores = len(os.sched_getaffinity(0))
    pieces = list(
        zip(np.array_split(target, num_cores), np.array_split(source, num_cores), strict=True)
    )
    with ThreadPoolExecutor(num_cores) as pool:
        copy_ns = _best_ns(lambda: list(pool.map(lambda pair: np.copyto(*pair), pieces)))
    product_ns = _best_ns(lambda: matrix @ matrix)
    return Device(
        name=f"host, {num_cores} cores",
        memory_bytes_per_s=2 * COPY_BYTES / copy_ns * 1e9,
        flops_per_s={"fp32": 2 * MATRIX_SIZE**3 / product_ns * 1e9},
        source="measured after the run: copy of 256 MiB, fp32 product of 2048³",
        is_measured=True,
    )


def _best_ns(work: Callable[[], object]) -> int:
    times = []
    for _ in range(REPEATS):
        start_ns = time.perf_counter_ns()
        work()
        times.append(time.perf_counter_ns() - start_ns)
    return min(times)
