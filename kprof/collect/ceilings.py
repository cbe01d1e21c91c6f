"""Ceilings measured on the machine at hand; so far those of the host."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from kprof.device import Device

COPY_BYTES = 256 << 20
MATRIX_SIZE = 2048
REPEATS = 3


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

    Bytes are those read and written by a copy of one large array by one thread; flops those of
    a square fp32 product through numpy's BLAS on all cores. The best of three counts.
    """
    rng = np.random.default_rng(0)
    source = np.empty(COPY_BYTES // 8)
    source.fill(1.0)
    target = np.empty_like(source)
    matrix = rng.standard_normal((MATRIX_SIZE, MATRIX_SIZE), dtype=np.float32)
    copy_ns = _best_ns(lambda: np.copyto(target, source))
    product_ns = _best_ns(lambda: matrix @ matrix)
    return Device(
        name=f"host, {os.cpu_count()} cores",
        memory_bytes_per_s=2 * COPY_BYTES / copy_ns * 1e9,
        flops_per_s={"fp32": 2 * MATRIX_SIZE**3 / product_ns * 1e9},
        source="measured after the run: numpy copy of 256 MiB, 2048³ fp32 product",
        is_measured=True,
    )


def _best_ns(work: Callable[[], object]) -> int:
    times = []
    for _ in range(REPEATS + 1):
        start_ns = time.perf_counter_ns()
        work()
        times.append(time.perf_counter_ns() - start_ns)
    return min(times)
