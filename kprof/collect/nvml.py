"""Samples of power, clocks, temperature and memory of the GPUs, as NVML gives them."""

# ruff: noqa: ANN401 - NVML's own handles and answers have no types.

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

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
