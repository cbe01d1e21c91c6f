"""The rank of this process among those of a run."""

from __future__ import annotations

import os
import sys

import torch

# The names that torchrun, Slurm's srun, Open MPI and other MPIs give a process's rank and size.
RANK_NAMES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
WORLD_SIZE_NAMES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
LOCAL_RANK_NAMES = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


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
    return _from_environment(RANK_NAMES, 0)


def world_size() -> int:
    """Return how many processes the run has."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_world_size())
    return _from_environment(WORLD_SIZE_NAMES, 1)


def local_rank() -> int:
    """Return the number of this process among those of its machine."""
    return _from_environment(LOCAL_RANK_NAMES, 0)


def _from_environment(names: tuple[str, ...], default: int) -> int:
    """Return what the first launcher says that started this process."""
    said = (os.environ.get(name, "") for name in names)
    return next((int(text) for text in said if text.isdigit()), default)
