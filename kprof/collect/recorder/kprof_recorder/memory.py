"""The allocator's history during a recording, and whose the memory is: `--memory` on a GPU."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from .native import time_ns

SNAPSHOT, OWNERS = "memory.pickle", "memory.json"
# Allocations and frees that torch keeps, each with its Python stack: some 2 kB.
MOST_ENTRIES = 400_000
STATISTICS = ("allocated_bytes", "requested_bytes", "reserved_bytes", "active_bytes")


class History:
    """torch's history of allocations, from `start` to `stop`, with notes on whose they are."""

    def __init__(self) -> None:
        self.find_models: Callable[[], Iterable[Module]] = tuple
        self.problem = ""
        self._is_on = self._is_own = False
        self._notes: list[dict[str, Any]] = []
        self._snapshot: Any = None
        self._statistics: dict[str, Any] = {}

    def start(self) -> None:
        """Keep a history from here on; one that the workload keeps itself stays as it is."""
        self._snapshot, self._notes, self.problem = None, [], ""
        if not torch.cuda.is_initialized():
            return
        is_kept = getattr(torch._C, "_cuda_isHistoryEnabled", bool)()
        try:
            if not is_kept:
                torch.cuda.memory._record_memory_history(
                    "all", context="alloc", stacks="python", max_entries=MOST_ENTRIES
                )
        except Exception as error:  # noqa: BLE001 - private to torch, of any version
            self.problem = f"{type(error).__name__}: {error}"
            return
        self._is_on, self._is_own = True, not is_kept
        self.note(())

    def note(self, optimizers: Iterable[Optimizer]) -> None:
        """Note the addresses of parameters, gradients and states that there are now."""
        if not self._is_on:
            return
        found: dict[str, set[int]] = {}
        # Of tensors without storage, or of the workload's own kind, nothing is noted.
        with contextlib.suppress(Exception), torch._C.DisableTorchFunction():
            for kind, tensor in self._owned(optimizers):
                with contextlib.suppress(Exception):
                    address = _local(tensor).untyped_storage().data_ptr()
                    found.setdefault(kind, set()).add(address)
        addresses = {kind: sorted(of - {0}) for kind, of in found.items()}
        self._notes.append({"time_ns": time_ns(), "addresses": addresses})

    def _owned(self, optimizers: Iterable[Optimizer]) -> Iterator[tuple[str, Any]]:
        parameters = [p for model in self.find_models() for p in model.parameters()]
        for optimizer in optimizers:
            parameters += [p for group in optimizer.param_groups for p in group["params"]]
            for state in optimizer.state.values():
                values = state.values() if isinstance(state, dict) else ()
                yield from (("optimizer", v) for v in values if isinstance(v, torch.Tensor))
        for parameter in parameters:
            yield "parameters", parameter
            if parameter.grad is not None:
                yield "gradients", parameter.grad
        for model in self.find_models():
            yield from (("buffers", buffer) for buffer in model.buffers())

    def stop(self) -> None:
        """Take the snapshot, and end the history if it is ours."""
        if not self._is_on:
            return
        self.note(())
        self._is_on = False
        try:
            self._snapshot = torch.cuda.memory._snapshot()
            self._statistics = {
                str(device): _statistics_of(device) for device in range(torch.cuda.device_count())
            }
            if self._is_own:
                torch.cuda.memory._record_memory_history(None)
        except Exception as error:  # noqa: BLE001 - private to torch, of any version
            self.problem = f"{type(error).__name__}: {error}"

    def write(self, folder: Path) -> None:
        """Write snapshot and notes into the folder of the process."""
        if self._snapshot is None:
            return
        with (folder / SNAPSHOT).open("wb") as file:
            pickle.dump(self._snapshot, file, protocol=4)
        told = {"notes": self._notes, "devices": self._statistics}
        (folder / OWNERS).write_text(json.dumps(told))
        self._snapshot = None


def _local(tensor: Any) -> Any:  # noqa: ANN401 - also a DTensor, which has no type everywhere
    """Return the part of a tensor that lies on this rank."""
    return getattr(tensor, "_local_tensor", tensor)


def _statistics_of(device: int) -> dict[str, int]:
    found = torch.cuda.memory_stats(device)
    told = {
        f"{name}.{when}": int(found.get(f"{name}.all.{when}", 0))
        for name in STATISTICS
        for when in ("current", "peak")
    }
    return {**told, "capacity_bytes": torch.cuda.get_device_properties(device).total_memory}


# One for the process, as the allocator is.
history = History()
