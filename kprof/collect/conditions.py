"""What the GPU in use was like at a moment: its clock, and who else is on it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from kprof.collect.nvml import Nvml, describe_devices, visible_devices
from kprof.device import BRAKES
from kprof.timing import Conditions


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
        self._num_at_first = 0
        if torch is None or not torch.cuda.is_initialized():
            return
        self._nvml = open_nvml()
        visible = visible_devices(describe_devices(self._nvml), os.environ)
        index = torch.cuda.current_device()
        if index < len(visible):
            self._handle = self._nvml.handles[visible[index]]
            self._num_at_first = self._count() or 0

    @property
    def num_neighbours(self) -> int:
        """Processes beside this one that were on the GPU at the beginning."""
        return max(0, self._num_at_first - 1)

    def read(self) -> Conditions:
        """Return the conditions now."""
        if self._nvml is None or self._handle is None:
            return Conditions()
        clock = self._nvml.ask(
            "nvmlDeviceGetClockInfo", self._handle, self._nvml.constant("NVML_CLOCK_SM")
        )
        count = self._count()
        others = None if count is None else max(0, count - self._num_at_first)
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
