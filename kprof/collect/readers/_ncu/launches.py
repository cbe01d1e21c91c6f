"""A launch as Nsight Compute profiled it, and what its metrics mean."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal

from kprof.collect.readers._ncu.numbers import in_bytes, in_ns

# The first that a report holds counts. The second names are labels of its details page.
DURATION = ("gpu__time_duration.sum", "gpu__time_duration.avg", "Duration")
DRAM_READ, DRAM_WRITTEN = ("dram__bytes_read.sum",), ("dram__bytes_write.sum",)
PERCENTS = {
    "dram_percent": (
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "DRAM Throughput",
    ),
    "sm_percent": (
        "sm__throughput.avg.pct_of_peak_sustained_elapsed",
        "Compute (SM) Throughput",
        "SM Throughput",
    ),
    "occupancy_percent": (
        "sm__warps_active.avg.pct_of_peak_sustained_active",
        "Achieved Occupancy",
    ),
}
REGISTERS = ("launch__registers_per_thread", "Registers Per Thread")
GPU_NAME = "device__attribute_display_name"
# Every generation of GPUs has other pipes; in each kernel at most a few of them work.
_TENSOR = re.compile(
    r"sm__(?:inst_executed_)?pipe_tensor\w*\.(?:avg|sum)\.pct_of_peak_sustained_(elapsed|active)"
)
WANTED = frozenset((*DURATION, *DRAM_READ, *DRAM_WRITTEN, *REGISTERS))


@dataclass(frozen=True)
class Metric:
    """A value with its unit."""

    value: Decimal
    unit: str = ""


@dataclass(frozen=True)
class Launch:
    """One launch that Nsight Compute profiled, by itself and perhaps several times over."""

    name: str
    grid: str | None = None
    """Blocks, `x,y,z`."""
    block: str | None = None
    process: int = 0
    device: int = 0
    stream: int = -1
    gpu: str | None = None
    """Name of the GPU, where the report tells."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)

    @property
    def duration_ns(self) -> int | None:
        """Return how long it took alone, at the clocks and with the caches that ncu saw to."""
        found = self._first(DURATION)
        return None if found is None else in_ns(found.value, found.unit)

    @property
    def is_rounded(self) -> bool:
        """Whether the duration was written in a larger unit than nanoseconds, and so rounded."""
        found = self._first(DURATION)
        return found is not None and in_ns(Decimal(1), found.unit) != 1

    @property
    def dram_read_bytes(self) -> int | None:
        """Return what it read from the device's memory."""
        found = self._first(DRAM_READ)
        return None if found is None else in_bytes(found.value, found.unit)

    @property
    def dram_written_bytes(self) -> int | None:
        """Return what it wrote to the device's memory."""
        found = self._first(DRAM_WRITTEN)
        return None if found is None else in_bytes(found.value, found.unit)

    @property
    def registers(self) -> int | None:
        """Return the registers of a thread."""
        found = self._first(REGISTERS)
        return None if found is None else int(found.value)

    def percent(self, column: str) -> float | None:
        """Return a throughput or the occupancy, of its peak, by the name of its column."""
        if column == "tensor_percent":
            return self._tensor_percent()
        found = self._first(PERCENTS[column])
        return None if found is None else float(found.value)

    def _tensor_percent(self) -> float | None:
        """Return the throughput of the busiest pipe of the tensor cores."""
        found: dict[str, list[float]] = {"elapsed": [], "active": []}
        for name, metric in self.metrics.items():
            if is_tensor := _TENSOR.fullmatch(name):
                found[is_tensor[1]].append(float(metric.value))
        return max(found["elapsed"] or found["active"], default=None)

    def _first(self, names: tuple[str, ...]) -> Metric | None:
        return next((self.metrics[name] for name in names if name in self.metrics), None)


def is_wanted(name: str, unit: str) -> bool:
    """Tell the metrics that are read here from the hundreds that a report may hold.

    On the details page other sections give the same labels to rates in bytes per second.
    """
    is_share = any(name in names for names in PERCENTS.values()) or _TENSOR.fullmatch(name)
    return unit in ("%", "") if is_share else name in WANTED
