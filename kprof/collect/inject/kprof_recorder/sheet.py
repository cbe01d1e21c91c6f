"""What a process of a trial leaves behind: a file with a line for everything that was timed."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from .capture import used_devices
from .ranks import local_rank, rank, started_by, world_size
from .recording import now
from .schedule import SHEET


class Sheet:
    """Where a process writes what it timed: a line for everything, there at once.

    Nothing is written before the first step: a process without steps leaves nothing.
    """

    def __init__(self, raw: Path) -> None:
        self._raw = raw
        self._path: Path | None = None

    def write(self, kind: str, **told: Any) -> None:  # noqa: ANN401 - whatever JSON can hold
        """Write a line of this kind."""
        if self._path is None:
            folder = self._raw / f"rank{rank()}-pid{os.getpid()}"
            folder.mkdir(parents=True, exist_ok=True)
            self._path = folder / SHEET
        # Opened for every line, so that a forked child has no part in it.
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **told}) + "\n")


def describe_process(rule: str) -> dict[str, Any]:
    """Return what there is to know about this process, which counts steps by this rule."""
    gpus = _gpus()
    return {
        "schema": 1,
        "pid": os.getpid(),
        "started_by": started_by(),
        "host": platform.node(),
        "rank": rank(),
        "world_size": world_size(),
        "local_rank": local_rank(),
        "rule": rule,
        "torch": torch.__version__,
        "device_name": gpus[0]["name"] if gpus else None,
        "gpus": gpus,
        "time_ns": now(),
    }


def _gpus() -> list[dict[str, Any]]:
    """Return the GPUs that this process uses, the one first that it uses now."""
    if not torch.cuda.is_initialized():
        return []
    current = torch.cuda.current_device()
    numbers = [current, *(device for device in used_devices() if device != current)]
    found = [(number, torch.cuda.get_device_properties(number)) for number in numbers]
    # torch tells the UUID from 2.5 on.
    return [
        {"number": number, "name": gpu.name, "uuid": str(getattr(gpu, "uuid", ""))}
        for number, gpu in found
    ]
