"""Which machine this is, as far as a calibration of its clock goes: its GPU, or its host."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kprof.collect.nvml import Nvml, describe_devices, visible_devices


@dataclass(frozen=True)
class Machine:
    """What a calibration is valid for."""

    kind: Literal["gpu", "host"]
    name: str
    driver: str | None


def this_machine() -> Machine:
    """Return the first GPU that programs see, else the host's processor."""
    nvml = Nvml()
    try:
        devices = describe_devices(nvml)
        for index in visible_devices(devices, os.environ)[:1]:
            device = next(d for d in devices if d["index"] == index)
            return Machine("gpu", str(device.get("name")), str(device.get("driver")))
    finally:
        nvml.close()
    return this_host()


def this_host() -> Machine:
    """Return the host's processor."""
    return Machine("host", processor(), None)


def processor() -> str:
    """Return the model of the host's processor."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()
