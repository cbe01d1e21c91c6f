"""What NVML saw of the GPUs in a span of time, read while it is being written."""

from __future__ import annotations

import json
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from kprof.collect.nvml import Nvml, read_sample, visible_devices

Sample = dict[str, Any]

# Below it, the counter's own steps of tens of milliseconds would be a part of the result.
LEAST_ENERGY_NS = 2_000_000_000
# NVML's power is the mean of the second before, so the first second of a load is not in it.
POWER_LAG_NS = 1_000_000_000


def read_with_processes(nvml: Nvml, index: int) -> Sample:
    """Return one reading of a GPU, and how many processes are on it."""
    found = nvml.ask("nvmlDeviceGetComputeRunningProcesses", nvml.handles[index])
    processes = {} if found is None else {"num_processes": len(found)}
    return {**read_sample(nvml, index), **processes}


class Tail:
    """The lines of a file that somebody is writing, each once it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_read = 0

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield what has been added since."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._num_read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._num_read += len(line)
                yield json.loads(line)


class Samples:
    """The samples of every GPU so far, by NVML's index."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self._devices: list[dict[str, Any]] = []
        self._of: dict[int, list[Sample]] = {}

    def look(self) -> None:
        """Read what has been added."""
        for line in self._tail.lines():
            if "devices" in line:
                self._devices = line["devices"]
            else:
                self._of.setdefault(line["device"], []).append(line)

    def index_of(self, gpu: Mapping[str, Any]) -> int | None:
        """Return NVML's index of a GPU that a process says it uses; None if there is no such."""
        for device in self._devices:
            if gpu["uuid"] and str(device.get("uuid", "")).endswith(gpu["uuid"]):
                return int(device["index"])
        visible = visible_devices(self._devices, os.environ)
        return visible[gpu["number"]] if gpu["number"] < len(visible) else None

    @property
    def driver(self) -> str | None:
        """The driver's version; None where NVML has told nothing."""
        return next((one.get("driver") for one in self._devices), None)

    def is_partitioned(self, index: int | None) -> bool:
        """Tell whether a GPU is divided into instances (MIG): it is sampled as a whole."""
        return any(one["index"] == index and one.get("is_mig") for one in self._devices)

    def first(self, index: int) -> Sample:
        """Return the first sample of a GPU, from before the workload came to it."""
        return next(iter(self._of.get(index, [])), {})

    def inside(self, index: int | None, span_ns: tuple[int, int], quantity: str) -> list[Any]:
        """Return the readings of a quantity in a span of time."""
        samples = self._of.get(index, []) if index is not None else []
        first = bisect_left(samples, span_ns[0], key=_time)
        last = bisect_right(samples, span_ns[1], key=_time)
        return [sample[quantity] for sample in samples[first:last] if quantity in sample]

    def joules(self, index: int | None, span_ns: tuple[int, int]) -> float | None:
        """Return the energy that a GPU took in a span of at least 2 s.

        None for a shorter one, and where its counter was not read on both sides.
        """
        is_long = span_ns[1] - span_ns[0] >= LEAST_ENERGY_NS
        return self.counted_joules(index, span_ns) if is_long else None

    def counted_joules(self, index: int | None, span_ns: tuple[int, int]) -> float | None:
        """Return by how much the energy counter rose in a span, however short."""
        known = self._around(index, span_ns, "energy_mj")
        if not known or known[0]["time_ns"] > span_ns[0] or known[-1]["time_ns"] < span_ns[1]:
            return None
        return (_energy_at(known, span_ns[1]) - _energy_at(known, span_ns[0])) / 1000

    def joules_by_power(self, index: int | None, span_ns: tuple[int, int]) -> float | None:
        """Return the integral of the power over a span; None where it was not sampled throughout.

        A second way to the energy, coarser than the counter: to check that with.
        """
        around = self._around(index, span_ns, "power_w")
        inside = [sample for sample in around if span_ns[0] <= sample["time_ns"] <= span_ns[1]]
        if len(inside) < 2:
            return None
        pairs = pairwise(inside)
        total = sum((b["time_ns"] - a["time_ns"]) * (a["power_w"] + b["power_w"]) for a, b in pairs)
        covered_ns = inside[-1]["time_ns"] - inside[0]["time_ns"]
        if covered_ns < 0.8 * (span_ns[1] - span_ns[0]):
            return None
        return float(total / 2e9 * (span_ns[1] - span_ns[0]) / covered_ns)

    def _around(self, index: int | None, span_ns: tuple[int, int], quantity: str) -> list[Sample]:
        """Return the samples of a quantity in a span, and the last before and the first after."""
        samples = self._of.get(index, []) if index is not None else []
        first = bisect_right(samples, span_ns[0], key=_time) - 1
        last = bisect_left(samples, span_ns[1], key=_time) + 1
        return [sample for sample in samples[max(first, 0) : last] if quantity in sample]


def _time(sample: Sample) -> int:
    return int(sample["time_ns"])


def _energy_at(samples: list[Sample], time_ns: int) -> float:
    """Return the counter between two readings, as if it rose evenly from one to the other."""
    place = max(1, bisect_left(samples, time_ns, key=_time))
    before, after = samples[place - 1 : place + 1] if len(samples) > 1 else (samples[0],) * 2
    between_ns = after["time_ns"] - before["time_ns"]
    share = (time_ns - before["time_ns"]) / between_ns if between_ns else 0.0
    return float(before["energy_mj"] + share * (after["energy_mj"] - before["energy_mj"]))
