"""The rank of this process among those of a run."""

from __future__ import annotations

import os
import sys

import torch

from .chosen import LOCAL_RANK_NAMES, RANK_NAMES, WORLD_SIZE_NAMES, number_in_environment


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
