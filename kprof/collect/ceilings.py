"""Measured ceilings of this host or its GPUs, kept for later runs."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from kprof.device import Device, Links, find_device
from kprof.errors import counted
from kprof.storage import cache_folder

COPY_BYTES = 256 << 20
MATRIX_SIZE = 2048
REPEATS = 4

FILE = "ceilings.json"


@dataclass(frozen=True)
class Figure:
    """One measured ceiling; `spread` is the interquartile range of its samples over the median."""

    name: str
    value: float
    unit: str
    detail: str = ""
    spread: float | None = None


@dataclass(frozen=True)
class Ceilings:
    """Measured ceilings of one GPU, with date and the GPU's state before and after."""

    gpu: str
    driver: str
    date: str
    torch: str
    num_sms: int
    memory_bytes: int
    took_s: float
    before: dict[str, float]
    after: dict[str, float]
    figures: tuple[Figure, ...]
    cache_bytes: int | None = None
    """Size of the second-level cache."""

    def best(self, name: str) -> float | None:
        """Return the highest of the figures whose name is, or begins with, `name`."""
        found = [f.value for f in self.figures if f.name == name or f.name.startswith(f"{name} ")]
        return max(found, default=None)

    def as_device(self) -> Device:
        """Return the ceilings for the roofline: the memory's as measured, products' by datasheet.

        A product of random normal data draws so much power that clocks fall: real data ran up to
        10 % faster on an H200, so what was measured is no ceiling. It serves where there is no
        datasheet.
        """
        memory = [self.best(name) for name in ("DRAM read", "DRAM write", "DRAM copy")]
        listed = find_device(self.gpu)
        dtypes = sorted({f.name.split()[0] for f in self.figures if f.unit == "FLOP/s"})
        cache_bytes = self.cache_bytes or (listed.cache_bytes if listed else None)
        source = f"memory measured on {self.date} with driver {self.driver}"
        return Device(
            name=self.gpu,
            memory_bytes_per_s=max(rate for rate in memory if rate is not None),
            flops_per_s=listed.flops_per_s if listed else {d: self.best(d) or 0.0 for d in dtypes},
            source=f"{source}; products: {listed.source}" if listed else source,
            is_measured=True,
            num_sms=self.num_sms,
            memory_bytes=self.memory_bytes,
            cache_bytes=cache_bytes,
            cached_copies=self._cached_copies(cache_bytes or 0),
            links=self._links(),
        )

    def _links(self) -> Links | None:
        """Return what an all-reduce over all GPUs of the host reached; None for a single GPU."""
        for figure in self.figures:
            number = re.search(r"(\d+) GPUs", figure.detail)
            if figure.name == "all-reduce" and number:
                return Links(figure.value, int(number[1]))
        return None

    def _cached_copies(self, cache_bytes: int) -> tuple[tuple[int, float], ...]:
        """Return bytes and ns of the copies whose source and target fit into the cache together."""
        sized = [(re.match(r"L2 copy (\d+) MiB", f.name), f.value) for f in self.figures]
        copies = [(int(found[1]) << 20, rate) for found, rate in sized if found]
        return tuple((n, n / rate * 1e9) for n, rate in sorted(copies) if n <= cache_bytes)


def keep_gpu_ceilings(ceilings: Ceilings) -> Path | None:
    """Keep the figures of this GPU, driver and day for later runs; None where no folder is."""
    path = _path_for(ceilings.gpu, ceilings.driver, ceilings.date)
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(ceilings)))
        partial.replace(path)
    except OSError:
        return None
    return path


def _path_for(gpu: str, driver: str, day: str) -> Path | None:
    folder = cache_folder()
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{gpu} {driver}").strip("-").lower()
    return folder / "ceilings" / f"{name}-{day}.json" if folder else None


def find_gpu_ceilings(gpu: str, driver: str) -> Ceilings | None:
    """Return what was last measured on a GPU of this name under this driver, or None."""
    days = _path_for(gpu, driver, "????-??-??")
    for path in sorted(days.parent.glob(days.name), reverse=True) if days else ():
        with suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(path.read_bytes(), type=Ceilings)
    return None


def keep_ceilings(raw: Path, device: Device) -> None:
    """Leave a run's ceilings beside its recording, for later analysis or on another machine."""
    (raw / FILE).write_bytes(msgspec.json.encode(device))


def kept_ceilings(raw: Path) -> Device | None:
    """Return the ceilings that were kept with a recording, or None."""
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
        name=f"host, {counted(num_cores, 'core')}",
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
