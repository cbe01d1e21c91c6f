"""Samples of the GPUs' power, clocks, temperature, memory, processes, from NVML."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

from kprof.device import BRAKES
from kprof.timing import Conditions

# ruff: noqa: ANN401 - NVML's own handles and answers have no types.


INTERVAL_S = 0.05


class Nvml:
    """NVML, opened; `close` it. `problem` says why there is none on this machine."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self.handles: dict[int, Any] = {}
        self._module: ModuleType | None = None
        try:
            import pynvml
        except ImportError:
            self.problem = "no NVML: the package nvidia-ml-py is not installed"
            return
        try:
            pynvml.nvmlInit()
            self._module = pynvml
            for index in range(pynvml.nvmlDeviceGetCount()):
                self.handles[index] = pynvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError as error:  # Also of one GPU that has fallen off the bus.
            self.problem = f"no NVML: {error}"
            self.handles.clear()

    def ask(self, name: str, *arguments: Any) -> Any:
        """Return what the NVML function `name` gives, or None where this GPU cannot tell."""
        module = self._module
        if module is None or not hasattr(module, name):
            return None
        try:
            value = getattr(module, name)(*arguments)
        except module.NVMLError:
            return None
        return value.decode() if isinstance(value, bytes) else value

    def constant(self, name: str) -> Any:
        """Return one of NVML's constants by name."""
        return getattr(self._module, name)

    def close(self) -> None:
        """Let go of the driver."""
        if self._module is not None:
            self._module.nvmlShutdown()
            self._module = None


def describe_devices(nvml: Nvml) -> list[dict[str, Any]]:
    """Return what does not change about each GPU; what NVML cannot tell is left out."""
    driver = nvml.ask("nvmlSystemGetDriverVersion")
    return [
        _known(
            index=index,
            name=nvml.ask("nvmlDeviceGetName", handle),
            uuid=nvml.ask("nvmlDeviceGetUUID", handle),
            driver=driver,
            power_limit_w=_scaled(nvml.ask("nvmlDeviceGetEnforcedPowerLimit", handle), 1e-3),
            max_sm_clock_mhz=_max_clock(nvml, handle, "NVML_CLOCK_SM"),
            max_memory_clock_mhz=_max_clock(nvml, handle, "NVML_CLOCK_MEM"),
            memory_bytes=getattr(nvml.ask("nvmlDeviceGetMemoryInfo", handle), "total", None),
            is_mig=_is_mig(nvml, handle),
        )
        for index, handle in nvml.handles.items()
    ]


def read_sample(nvml: Nvml, index: int) -> dict[str, Any]:
    """Return one reading of a GPU; a quantity that NVML cannot give is left out."""
    handle = nvml.handles[index]
    sensor = nvml.constant("NVML_TEMPERATURE_GPU")
    return _known(
        time_ns=time.time_ns(),
        device=index,
        power_w=_scaled(nvml.ask("nvmlDeviceGetPowerUsage", handle), 1e-3),
        energy_mj=nvml.ask("nvmlDeviceGetTotalEnergyConsumption", handle),
        sm_clock_mhz=_clock(nvml, handle, "NVML_CLOCK_SM"),
        memory_clock_mhz=_clock(nvml, handle, "NVML_CLOCK_MEM"),
        temperature_c=nvml.ask("nvmlDeviceGetTemperature", handle, sensor),
        utilization_percent=getattr(nvml.ask("nvmlDeviceGetUtilizationRates", handle), "gpu", None),
        memory_used_bytes=getattr(nvml.ask("nvmlDeviceGetMemoryInfo", handle), "used", None),
        throttle_reasons=nvml.ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle),
    )


class Sampler:
    """Writes a line a sample to `path` from a thread of its own, between `start` and `stop`."""

    def __init__(
        self,
        path: Path,
        open_nvml: Callable[[], Nvml] = Nvml,
        read: Callable[[Nvml, int], dict[str, Any]] = read_sample,
    ) -> None:
        self.path = path
        self._read = read
        self._nvml = open_nvml()
        self.problem = self._nvml.problem
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kprof-nvml", daemon=True)

    def start(self) -> None:
        """Begin to sample; does nothing on a machine without NVML."""
        if self._nvml.handles:
            self._thread.start()

    def stop(self) -> None:
        """End sampling and close the file."""
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._nvml.close()

    def _run(self) -> None:
        try:
            self._sample()
        except OSError as error:
            self.problem = f"{self.path} cannot be written ({error.strerror})"

    def _sample(self) -> None:
        devices = describe_devices(self._nvml)
        sampled = visible_devices(devices, os.environ)
        with self.path.open("w", encoding="utf-8") as file:
            file.write(json.dumps({"devices": devices}) + "\n")
            while True:
                began_s = time.monotonic()
                for index in sampled:
                    file.write(json.dumps(self._read(self._nvml, index)) + "\n")
                file.flush()
                rest_s = INTERVAL_S - (time.monotonic() - began_s)
                if self._is_over.wait(max(0.0, rest_s)):
                    return


def visible_devices(
    devices: list[dict[str, Any]], environment: Mapping[str, str]
) -> tuple[int, ...]:
    """Return NVML's indices of the GPUs that `CUDA_VISIBLE_DEVICES` names, in CUDA's order."""
    everything = tuple(int(device["index"]) for device in devices)
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return everything
    entries = [entry.strip() for entry in listed.split(",") if entry.strip()]
    chosen = tuple(
        int(device["index"]) for entry in entries for device in devices if _names(entry, device)
    )
    # A MIG instance's name is none of the GPUs' own; its GPU is still among them.
    return tuple(dict.fromkeys(chosen)) or everything


def _names(entry: str, device: dict[str, Any]) -> bool:
    if entry.isdigit():
        return bool(int(entry) == device["index"])
    return str(device.get("uuid", "")).startswith(entry)


def _known(**quantities: Any) -> dict[str, Any]:
    return {name: value for name, value in quantities.items() if value is not None}


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else round(value * factor, 3)


def _clock(nvml: Nvml, handle: Any, which: str) -> Any:
    return nvml.ask("nvmlDeviceGetClockInfo", handle, nvml.constant(which))


def _max_clock(nvml: Nvml, handle: Any, which: str) -> Any:
    return nvml.ask("nvmlDeviceGetMaxClockInfo", handle, nvml.constant(which))


def _is_mig(nvml: Nvml, handle: Any) -> bool | None:
    modes = nvml.ask("nvmlDeviceGetMigMode", handle)
    return None if modes is None else bool(modes[0])


class Watcher:
    """Reads the conditions of the current CUDA device; all missing where there is none.

    Processes that were on the GPU at the beginning are `num_neighbours`; those that come later
    count in each reading. A container shows other processes under numbers of its own, so they are
    counted, not looked up.
    """

    def __init__(self, open_nvml: Callable[[], Nvml] = Nvml) -> None:
        torch = sys.modules.get("torch")
        self._nvml: Nvml | None = None
        self._handle: Any = None
        self._num_at_first: int | None = None
        if torch is None or not torch.cuda.is_initialized():
            return
        self._nvml = open_nvml()
        visible = visible_devices(describe_devices(self._nvml), os.environ)
        index = torch.cuda.current_device()
        if index < len(visible):
            self._handle = self._nvml.handles[visible[index]]
            self._num_at_first = self._count()

    @property
    def num_neighbours(self) -> int | None:
        """Processes beside this one that were on the GPU at the beginning; None: not known."""
        return None if self._num_at_first is None else max(0, self._num_at_first - 1)

    def read(self) -> Conditions:
        """Return the conditions now."""
        if self._nvml is None or self._handle is None:
            return Conditions()
        clock = self._nvml.ask(
            "nvmlDeviceGetClockInfo", self._handle, self._nvml.constant("NVML_CLOCK_SM")
        )
        before, now = self._num_at_first, self._count()
        others = None if before is None or now is None else max(0, now - before)
        reasons = self._nvml.ask("nvmlDeviceGetCurrentClocksThrottleReasons", self._handle)
        is_braked = None if reasons is None else bool(int(reasons) & BRAKES)
        return Conditions(None if clock is None else float(clock), others, is_braked)

    def close(self) -> None:
        """Let go of the driver."""
        if self._nvml is not None:
            self._nvml.close()

    def _count(self) -> int | None:
        assert self._nvml is not None
        found = self._nvml.ask("nvmlDeviceGetComputeRunningProcesses", self._handle)
        return None if found is None else len(found)


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
    """The lines of a file that is being written, each once it is complete."""

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
