"""The processes of an export as ranks, with their GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kprof.collect.readers.nsys.database import Database, Numbers
from kprof.device import Device, device_of_attributes
from kprof.trace import Gpu

THREAD_BITS = 24
ONE_THREAD = (1 << THREAD_BITS) - 1
GPU_COLUMNS = ("id", "name", "smCount", "totalMemory", "computeMajor", "computeMinor", "cuDevice")
# Exports before 2022 describe the GPUs in another table, by CUDA's own numbers.
OLD_GPUS = (
    "TARGET_INFO_CUDA_GPU",
    (
        *("deviceId", "name", "numMultiprocessors", "globalMemorySize"),
        *("computeCapabilityMajor", "computeCapabilityMinor"),
    ),
)


@dataclass(frozen=True)
class Processes:
    """The processes that have a rank, by their global ids in ascending order."""

    global_pids: Numbers
    ranks: NDArray[np.int32]
    num_without: int
    """Processes that recorded something, but nothing that a device did."""

    @property
    def pids(self) -> list[int]:
        """The process ids, in ascending order."""
        return [pid_of(one) for one in self.global_pids.tolist()]

    def has_rank(self, global_pids: Numbers) -> NDArray[np.bool_]:
        """Tell which of these are ranks."""
        return np.isin(global_pids, self.global_pids)

    def ranks_of(self, global_pids: Numbers) -> NDArray[np.int32]:
        """Return the ranks of processes that have one."""
        if not len(global_pids):
            return np.zeros(0, dtype=np.int32)
        return self.ranks[np.searchsorted(self.global_pids, global_pids)]


def processes_of(
    database: Database, device: list[str], host: list[str], known: Mapping[int, int]
) -> Processes:
    """Return the processes that used a device, or all where none did.

    `device` and `host` are the tables of activities and of ranges; `known` gives ranks by process
    id. Who is not in it gets the lowest number that is free, in the order of the ids.
    """
    on_device = {pid for table in device for pid in _distinct(database, table, "globalPid")}
    on_host = {
        thread & ~ONE_THREAD for table in host for thread in _distinct(database, table, "globalTid")
    }
    chosen = sorted(on_device or on_host)
    free = (number for number in itertools.count() if number not in known.values())
    ranks = [known[pid] if (pid := pid_of(one)) in known else next(free) for one in chosen]
    return Processes(
        np.array(chosen, dtype=np.int64),
        np.array(ranks, dtype=np.int32),
        len(on_host.difference(chosen)),
    )


def _distinct(database: Database, table: str, column: str) -> list[int]:
    if not database.has(table, column):
        return []
    rows = database.rows(f'SELECT DISTINCT "{column}" FROM "{table}"')
    return [number for (value,) in rows if (number := _whole(value)) is not None]


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def pid_of(global_pid: int) -> int:
    """Return the process id that the operating system knows."""
    return (global_pid >> THREAD_BITS) & ONE_THREAD


def gpus_of(database: Database, processes: Processes) -> tuple[Gpu, ...]:
    """Return the GPUs by the numbers under which CUDA knew them, as far as the export tells.

    In a trace of several processes each one's, since one number may stand for several GPUs.
    """
    rows = database.known("TARGET_INFO_GPU", GPU_COLUMNS)
    if not any(row[0] is not None for row in rows):
        rows = [(*row, None) for row in database.known(*OLD_GPUS)]
    found = {}
    for number, name, num_sms, memory, major, minor, cuda_number in rows:
        capability = None if major is None or minor is None else f"{major}.{minor}"
        index = number if cuda_number is None else cuda_number
        found[_whole(number)] = Gpu(
            _whole(index) or 0, str(name or ""), _whole(num_sms), _whole(memory), capability
        )
    return _as_cuda_saw_them(database, found, processes) or tuple(found.values())


def device_of(database: Database, gpu: Gpu) -> Device | None:
    """Return the ceilings of a GPU by its attributes, as far as the export tells them."""
    columns = ("name", "clockRate", "memoryBandwidth")
    for name, clock_hz, bytes_per_s in database.known("TARGET_INFO_GPU", columns):
        known = (gpu.num_sms, _whole(clock_hz), _whole(bytes_per_s))
        if name == gpu.name and None not in known:
            return device_of_attributes(gpu.name, gpu.compute_capability, *(n or 0 for n in known))
    return None


def _as_cuda_saw_them(
    database: Database, gpus: dict[int | None, Gpu], processes: Processes
) -> tuple[Gpu, ...]:
    rank_of = dict(zip(processes.pids, processes.ranks.tolist(), strict=True))
    seen = []
    named = database.known("TARGET_INFO_CUDA_DEVICE", ("pid", "cudaId", "gpuId"))
    for pid, cuda_number, number in named:
        index, gpu = _whole(cuda_number), gpus.get(_whole(number))
        if index is not None and gpu is not None and isinstance(pid, int) and pid in rank_of:
            rank = rank_of[pid] if len(rank_of) > 1 else None
            seen.append(replace(gpu, index=index, rank=rank))
    return tuple(dict.fromkeys(seen))
