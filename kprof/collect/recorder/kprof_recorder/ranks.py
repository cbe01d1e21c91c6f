"""The place of this process in a run: rank, node, process groups and GPUs."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from .chosen import (
    LOCAL_RANK_NAMES,
    NODE_NAMES,
    RANK_NAMES,
    WORLD_SIZE_NAMES,
    number_in_environment,
)


def started_by() -> int | None:
    """Return the process whose `multiprocessing` started this one, None if that is not how."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is None:
        return None
    parent = multiprocessing.parent_process()
    if parent is not None:
        return int(parent.pid)
    # A spawned process imports the script before it learns of its parent.
    is_beginning = getattr(multiprocessing.current_process(), "_inheriting", False)
    return os.getppid() if is_beginning else None


def rank() -> int:
    """Return the number of this process among all of the run."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank())
    return number_in_environment(RANK_NAMES) or 0


def world_size() -> int:
    """Return how many processes the run has."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_world_size())
    return number_in_environment(WORLD_SIZE_NAMES) or 1


def local_rank() -> int:
    """Return the number of this process among those of its machine."""
    return number_in_environment(LOCAL_RANK_NAMES) or 0


def node() -> int | None:
    """Return the number of this machine among those of the job; None if the launcher tells none."""
    return number_in_environment(NODE_NAMES)


def process_groups() -> list[dict[str, Any]]:
    """Return name, description and ranks of the process groups that this process is in now."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    # torch has no public list of them; its own profiler asks here, too.
    world = getattr(torch.distributed.distributed_c10d, "_world", None)
    return [
        {
            "name": str(name),
            "description": str(getattr(group, "group_desc", "")),
            "ranks": [int(one) for one in torch.distributed.get_process_group_ranks(group)],
        }
        for group, name in getattr(world, "pg_names", {}).items()
        if group in getattr(world, "pg_map", {})
    ]


def gpu_uuids() -> list[str | None]:
    """Return the UUIDs of the GPUs that this process sees, as nvidia-smi writes them."""
    if not torch.cuda.is_initialized():
        return []
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    # Since torch 2.5.
    found = [getattr(device, "uuid", None) for device in devices]
    return [None if uuid is None else f"GPU-{uuid}" for uuid in found]
