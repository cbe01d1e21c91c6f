"""Which ranks are recorded, as their launchers number them; every Python of a workload asks."""

from __future__ import annotations

import os

# The names that torchrun, Slurm's srun, Open MPI and other MPIs give a process's rank and size.
RANK_NAMES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
WORLD_SIZE_NAMES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
LOCAL_RANK_NAMES = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
# Those of its machine among the job's.
NODE_NAMES = ("GROUP_RANK", "SLURM_NODEID")

# One rank of each host.
PER_HOST = "per-host"
# No job has more.
MOST_RANKS = 1_000_000


def number_in_environment(names: tuple[str, ...]) -> int | None:
    """Return what the first launcher says that started this process; None if none did."""
    said = (os.environ.get(name, "") for name in names)
    return next((int(text) for text in said if text.isdecimal()), None)


def spans_in(text: str) -> list[range]:
    """Return the ranks in a text as 0,8-15.

    Raises:
        ValueError: a part of it names no rank; it is the error's only argument.
    """
    found = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = (first, last) if dash else (first, first)
        if not all(end.isascii() and end.isdecimal() and int(end) < MOST_RANKS for end in ends):
            raise ValueError(part.strip())
        if int(ends[0]) > int(ends[1]):
            raise ValueError(part.strip())
        found.append(range(int(ends[0]), int(ends[1]) + 1))
    return found


def is_chosen(text: str, rank: int) -> bool:
    """Tell whether a text names this rank; where it wants one of each host, each may be it."""
    return text == PER_HOST or any(rank in span for span in spans_in(text))


def is_this_process_chosen(text: str) -> bool:
    """Tell whether a text names this process, as far as its launcher tells its rank."""
    if text == PER_HOST:
        return not number_in_environment(LOCAL_RANK_NAMES)
    rank = number_in_environment(RANK_NAMES)
    return rank is None or is_chosen(text, rank)
