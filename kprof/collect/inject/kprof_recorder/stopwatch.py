"""How long some steps took together, and each of them."""

from __future__ import annotations

from typing import Any

import torch

from .capture import synchronize, used_devices
from .deviceclock import MOST_STEPS, DeviceClock
from .recording import now


class Stopwatch:
    """Times a block, and steps in it: on the GPU where one is used, else on the host."""

    def __init__(self, num_steps: int, first_step: int) -> None:
        synchronize()
        self.first_step = first_step
        self._every = -(-num_steps // MOST_STEPS)
        self._device = DeviceClock()
        self._host: list[int] = []
        self._began_ns = 0
        for device in used_devices():
            torch.cuda.reset_peak_memory_stats(device)
        self.start_ns = now()

    def step_begins(self, index: int) -> None:
        """Note the beginning of a step."""
        if index % self._every == 0:
            self._device.begin(index)
            self._began_ns = now()

    def step_ends(self, index: int) -> None:
        """Note the end of a step."""
        if index % self._every == 0 and self._began_ns:
            self._host.append(now() - self._began_ns)
            self._device.end(index)

    def stop(self, num_steps: int) -> dict[str, Any]:
        """Return what there is to say, now that the GPU has done all."""
        synchronize()
        end_ns = now()
        is_on_device = torch.cuda.is_initialized()
        steps_ns = list(self._device.durations_ns().values()) if is_on_device else self._host
        peaks = [torch.cuda.max_memory_allocated(device) for device in used_devices()]
        return {
            "first_step": self.first_step,
            "num_steps": num_steps,
            "start_ns": self.start_ns,
            "end_ns": end_ns,
            "time_ns": (end_ns - self.start_ns) / num_steps,
            "steps_ns": steps_ns,
            "steps_clock": "device" if is_on_device else "host",
            "peak_memory_bytes": sum(peaks) if peaks else None,
        }
