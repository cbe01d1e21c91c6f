"""A profiled launch of Nsight Compute: its metrics with their units."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal

import pandas as pd

SEPARATORS = ".,"
# Other thousands separators: spaces of several widths, and the Swiss apostrophe.
_FURTHER = re.compile("[\\s\u00a0\u2009\u202f'\u2019]")
_NUMBER = re.compile(r"[-+]?\d[\d.,]*(?:[eE][-+]?\d+)?")

# Powers of ten: Nsight Compute's K is 1,000.
_PREFIXES = {"": 0, "K": 3, "M": 6, "G": 9, "T": 12}
_BYTES = re.compile(r"([KMGT]?)(?:byte|B)s?")
_SECONDS = {"": 0, "m": -3, "u": -6, "µ": -6, "n": -9}
_TIME = re.compile(r"([munµ]?)(?:second|s)s?")

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
    device: int | None = None
    stream: int | None = None
    gpu: str | None = None
    """Name of the GPU. This, the device and the stream are None where the report has none."""
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


def find_decimal_mark(texts: Iterable[str]) -> str | None:
    """Return the mark before the decimals in these numbers, `.` or `,`.

    `1,234` alone may be either; another number beside it tells. A dot where none does, and None
    where they contradict one another.
    """
    marks = {mark for text in texts if (mark := _told(text)) is not None}
    return None if len(marks) > 1 else next(iter(marks), ".")


def _told(text: str) -> str | None:
    """Return the decimal mark that one number gives away, or None."""
    text = _FURTHER.sub("", text).lstrip("+-")
    used = [character for character in text if character in SEPARATORS]
    if not used or not _NUMBER.fullmatch(text):
        return None
    last, other = used[-1], SEPARATORS.replace(used[-1], "")
    if len(set(used)) == 2:
        return last
    if len(used) > 1:
        return other
    before, _, after = text.partition(last)
    is_group = len(after) == 3 and 1 <= len(before) <= 3 and not before.startswith("0")
    return None if is_group else last


def number_in(text: str, decimal_mark: str) -> Decimal | None:
    """Return the number that a text says, or None for `n/a` and the like."""
    text = _FURTHER.sub("", text)
    if not _NUMBER.fullmatch(text):
        return None
    group = SEPARATORS.replace(decimal_mark, "")
    return Decimal(text.replace(group, "").replace(decimal_mark, "."))


def is_wanted(name: str, unit: str) -> bool:
    """Tell the metrics that are read here from the hundreds that a report may hold.

    On the details page other sections give the same labels to rates in bytes per second.
    """
    is_share = any(name in names for names in PERCENTS.values()) or _TENSOR.fullmatch(name)
    return unit in ("%", "") if is_share else name in WANTED


def counted_columns(launches: list[Launch]) -> dict[str, pd.Series]:
    """Return a column for each quantity, with a row for each launch."""
    whole = {
        "counted_ns": [launch.duration_ns for launch in launches],
        "dram_read_bytes": [launch.dram_read_bytes for launch in launches],
        "dram_written_bytes": [launch.dram_written_bytes for launch in launches],
        "registers": [launch.registers for launch in launches],
    }
    names = (*PERCENTS, "tensor_percent")
    percents = {name: [launch.percent(name) for launch in launches] for name in names}
    return {
        **{name: pd.Series(values, dtype="Int64") for name, values in whole.items()},
        **{name: pd.Series(values, dtype="float64") for name, values in percents.items()},
    }


def in_bytes(number: Decimal, unit: str) -> int | None:
    """Return whole bytes; None where the unit is not one of bytes."""
    found = _BYTES.fullmatch(unit)
    return None if found is None else round(number.scaleb(_PREFIXES[found[1]]))


def in_ns(number: Decimal, unit: str) -> int | None:
    """Return whole nanoseconds; None where the unit is not one of time."""
    found = _TIME.fullmatch(unit)
    return None if found is None else round(number.scaleb(_SECONDS[found[1]] + 9))
