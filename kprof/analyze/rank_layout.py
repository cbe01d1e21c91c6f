"""Layout of ranks: what each does in the job, by the process groups that its recording names."""

from __future__ import annotations

import re
from collections.abc import Collection

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kprof.analyze.attribution.steps import outside_steps
from kprof.trace import Meta, ProcessGroup, Trace

# Words in a group's description, as DeviceMesh, Megatron and torchtitan write them.
DIMENSIONS = {
    "data": {"dp", "ddp", "fsdp", "data", "replicate", "shard"},
    "tensor": {"tp", "tensor"},
    "pipeline": {"pp", "pipeline", "pipe", "stage"},
    "context": {"cp", "sp", "context", "sequence"},
    "expert": {"ep", "expert"},
}
PIPELINE, EXPERT = "pipeline", "expert"
# torch's description of a group whose maker gave none.
UNNAMED = ("", "undefined")


def dimension_of(description: str) -> str | None:
    """Return along what a group splits the job: data, tensor, …; None for several or none.

    The data-parallel group of experts is one of data.
    """
    words = set(re.split(r"[^a-z]+", description.lower()))
    found = [name for name, own in DIMENSIONS.items() if own & words]
    return found[0] if len(found) == 1 or found[1:] == ["expert"] else None


def groups_by_dimension(meta: Meta) -> dict[str, list[ProcessGroup]]:
    """Return the groups of several ranks along each dimension, in which each rank has one place.

    A dimension that is itself split, as in hybrid sharding, counts by its groups' descriptions.
    """
    by_dimension: dict[str, list[ProcessGroup]] = {}
    for group in meta.process_groups:
        dimension = dimension_of(group.description)
        if dimension is not None and len(group.ranks) > 1:
            by_dimension.setdefault(dimension, []).append(group)
    found: dict[str, list[ProcessGroup]] = {}
    for dimension, groups in by_dimension.items():
        if _are_apart(groups):
            found[dimension] = groups
            continue
        for description in dict.fromkeys(group.description for group in groups):
            own = [group for group in groups if group.description == description]
            if _are_apart(own):
                found[description.removeprefix("mesh_")] = own
    order = [*DIMENSIONS]
    return dict(sorted(found.items(), key=lambda one: (one[0] not in order, one[0])))


def places(meta: Meta) -> dict[int, dict[str, int]]:
    """Return each rank's place in its group along each dimension; nothing where not recorded."""
    found: dict[int, dict[str, int]] = {}
    for dimension, groups in groups_by_dimension(meta).items():
        for group in groups:
            for place, rank in enumerate(group.ranks):
                found.setdefault(rank, {})[dimension] = place
    return found


def collectives_along(
    trace: Trace, dimension: str, names: re.Pattern[str]
) -> tuple[list[ProcessGroup], NDArray[np.int64]]:
    """Return the groups along a dimension, and the rows of their collectives of such names.

    Calls outside of steps are left out.
    """
    groups = groups_by_dimension(trace.meta).get(dimension, [])
    told = trace.kernels["collective"].cat
    # A row without a collective has the code -1, which reads the last.
    is_named = np.array([*(bool(names.match(str(name))) for name in told.categories), False])
    chosen = is_named[told.codes.to_numpy()] & _is_in_group(trace.kernels, groups)
    return groups, np.flatnonzero(chosen & ~outside_steps(trace))


def _is_in_group(kernels: pd.DataFrame, groups: Collection[ProcessGroup]) -> NDArray[np.bool_]:
    """Tell which collectives belong to one of some process groups, by its name and their rank."""
    ranks = kernels["rank"].to_numpy(np.int64)
    names = kernels["group"].cat
    # A row without a group has the code -1, which reads the last.
    own = np.array([*(str(text).partition(" ")[0] for text in names.categories), ""])
    of_row = own[names.codes.to_numpy()]
    found = np.zeros(len(kernels), dtype=bool)
    for name in {group.name for group in groups} - {""}:
        members = {rank for group in groups if group.name == name for rank in group.ranks}
        found |= (of_row == name) & np.isin(ranks, [*members])
    return found


def what_they_share(ranks: Collection[int], all_ranks: Collection[int], meta: Meta) -> str | None:
    """Return the pipeline stage, process group or place in groups that these ranks alone have."""
    wanted = frozenset(ranks)
    by_place = _ranks_by_place(meta, all_ranks)
    own_places = [place for place, those in by_place.items() if those == wanted]
    for dimension, number in own_places:
        if dimension == PIPELINE:
            return f"pipeline stage {number}"
    if len(wanted) < 2:
        return None
    for group in meta.process_groups:
        if wanted == {*group.ranks}:
            name = group.name if group.description in UNNAMED else group.description
            return f"process group {name} {list(group.ranks)}"
    return next((f"rank {number} of every {name} group" for name, number in own_places), None)


def _ranks_by_place(meta: Meta, among: Collection[int]) -> dict[tuple[str, int], set[int]]:
    """Return the ranks at each dimension and place in its groups."""
    found: dict[tuple[str, int], set[int]] = {}
    for rank, own in places(meta).items():
        for place in own.items():
            if rank in among:
                found.setdefault(place, set()).add(rank)
    return found


def _are_apart(groups: list[ProcessGroup]) -> bool:
    """Tell whether no rank is in two groups of different ranks."""
    of_rank: dict[int, tuple[int, ...]] = {}
    pairs = ((rank, group.ranks) for group in groups for rank in group.ranks)
    return all(of_rank.setdefault(rank, ranks) == ranks for rank, ranks in pairs)
