"""Causes of lateness: where late ranks spend the time by which they come after the others.

From one matched collective to the next, all ranks of a process group take equally long. This time
is computation, communication, idle time by cause, and waiting. A late rank waits less, so by as
much some of the others are longer; these are compared with ranks that were in time in the same
step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kprof.analyze.attribution.overlap import allotted_time
from kprof.analyze.idle import causes
from kprof.analyze.late_ranks import Lateness, find_lateness, waits_by_unit
from kprof.trace import Trace, once_per_trace

Floats = NDArray[np.float64]
Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]

Cause = Literal["data", "host", "compute", "clock", "link", "inconclusive"]

COMPUTE, COMMUNICATION, UNKNOWN = "computation", "communication", "unknown"
OF_PART: dict[str, Cause] = {
    COMPUTE: "compute",
    COMMUNICATION: "link",
    causes.DATA_LOADING: "data",
    causes.LAUNCH_BOUND: "host",
    causes.SYNCHRONIZATION: "host",
    causes.PAGEABLE_COPY: "host",
    causes.ALLOCATOR: "host",
}
PARTS = tuple(dict.fromkeys((COMPUTE, COMMUNICATION, *causes.CAUSES, UNKNOWN)))
# A cause has so much of what all parts are longer by.
MOST = 0.6
# Of computation that is longer: launches that ranks in time make, too, have so much of it.
SAME_LAUNCHES = 0.6
# A GPU is slower where so much of its time is in kernels that are, by half of the mean at least.
BROAD = 0.8


@dataclass(frozen=True)
class LateCause:
    """Why a rank, or ranks in turn, came late; times in ns per unit in which they were late."""

    rank: int | None
    """None: all ranks that are late in turn."""
    cause: Cause
    longer_ns: dict[str, float] = field(default_factory=dict)
    """By how much each part of its time was longer than on ranks in time; negative: shorter."""
    same_launches_share: float | None = None
    """Share of the longer computation in launches of the kernels and grids that ranks in time have;
    None where it is not longer, or no grid was recorded."""
    num_late: int = 0
    """Units and ranks that were compared."""
    why_not: str = ""
    """Why the cause is inconclusive; empty where it is known."""


@once_per_trace
def find_late_causes(trace: Trace) -> tuple[LateCause, ...]:
    """Return the cause of each straggler, else of the ranks that are late in turn."""
    found = find_lateness(trace)
    if found is None or not (found.stragglers or found.num_rotating):
        return ()
    spent = _spent(trace, found)
    groups: list[tuple[int | None, frozenset[int]]] = [
        (rank, frozenset({rank})) for rank in found.stragglers
    ]
    if not groups:
        groups = [(None, frozenset(one.rank for one in found.ranks))]
    if spent is None:
        why = "no rank's activities were recorded in detail"
        return tuple(LateCause(rank, "inconclusive", why_not=why) for rank, _ in groups)
    return tuple(_cause(spent, rank, of) for rank, of in groups)


@dataclass(frozen=True)
class _Spent:
    """The time of ranks by unit and part, each until the unit's collectives."""

    ranks: Int64s
    is_late: Bools
    """By rank and unit."""
    time_ns: dict[str, Floats]
    """Of each part, by rank and unit."""
    launches: pd.DataFrame
    """Computation: places in `ranks` and in units, `key` (of name and grid), `duration_ns`."""
    has_grids: bool


def _spent(trace: Trace, found: Lateness) -> _Spent | None:
    marks = _marks(trace)
    if marks is None:
        return None
    kernels = trace.kernels
    ranks, units = (np.unique(marks[c].to_numpy(np.int64)) for c in ("rank", "unit"))
    is_collective = (kernels["kind"].eq("collective") | kernels["collective"].notna()).to_numpy()
    waited = np.zeros(len(kernels), dtype=np.int64)
    waited[marks["row"].to_numpy(np.int64)] = marks["exposed_ns"].to_numpy(np.int64)
    spent = np.maximum(allotted_time(trace) - waited, 0)
    unit = _unit_of(kernels, marks)
    part = np.where(is_collective, PARTS.index(COMMUNICATION), PARTS.index(COMPUTE))
    items = [(kernels["rank"].to_numpy(np.int64), unit, part, spent)]
    idle = trace.idle
    cause = np.array([PARTS.index(str(c)) for c in causes.CAUSES] + [PARTS.index(UNKNOWN)])
    code = pd.Categorical(idle["cause"], categories=list(causes.CAUSES)).codes
    items.append(
        (
            idle["rank"].to_numpy(np.int64),
            _unit_of(idle, marks),
            cause[code],
            idle["duration_ns"].to_numpy(np.int64),
        )
    )
    table = np.zeros((len(PARTS), len(ranks), len(units)))
    for rank, at_unit, at_part, time_ns in items:
        known = (at_unit >= 0) & np.isin(rank, ranks)
        place = (at_part, np.searchsorted(ranks, rank), np.searchsorted(units, at_unit))
        np.add.at(table, tuple(p[known] for p in place), time_ns[known])
    late_in = {one.rank: one.late_in for one in found.ranks}
    return _Spent(
        ranks=ranks,
        is_late=np.array([np.isin(units, late_in.get(rank, ())) for rank in ranks.tolist()]),
        time_ns=dict(zip(PARTS, table, strict=True)),
        launches=_launches(kernels, ~is_collective & (unit >= 0), (ranks, units, unit)),
        has_grids=_has_grids(kernels, ~is_collective),
    )


def _marks(trace: Trace) -> pd.DataFrame | None:
    """Return the matched collectives of the ranks in detail, with their rows and units."""
    found = waits_by_unit(trace)
    if found is None or not len(trace.kernels) or "kind" not in trace.kernels:
        return None
    waits, _ = found
    if trace.all_ranks is None:
        return waits
    rows = trace.kernels["rank"].to_numpy(np.int64)
    parts = [
        part
        for rank in np.unique(rows).tolist()
        if (part := _in_detail(trace.kernels, waits, rank)) is not None
    ]
    return pd.concat(parts) if parts else None


def _in_detail(kernels: pd.DataFrame, waits: pd.DataFrame, rank: int) -> pd.DataFrame | None:
    """Return one rank's waits with their rows in its own table, whose clock may be another one.

    Both have the same collectives; the table of all ranks lacks some at its ends.
    """
    mine = waits[(waits["rank"] == rank).to_numpy(bool)].sort_values("start_ns", kind="stable")
    rows = np.flatnonzero((kernels["rank"] == rank).to_numpy() & kernels["collective"].notna())
    start = kernels["start_ns"].to_numpy(np.int64)[rows]
    order = np.argsort(start, kind="stable")
    rows, start = rows[order], start[order]
    wanted = mine["start_ns"].to_numpy(np.int64)
    for first in start:
        shifted = wanted - wanted[:1] + first
        place = np.minimum(np.searchsorted(start, shifted), len(start) - 1)
        if (start[place] == shifted).all():
            found: pd.DataFrame = mine.assign(row=rows[place], start_ns=start[place])
            return found
    return None


def _unit_of(table: pd.DataFrame, marks: pd.DataFrame) -> Int64s:
    """Return the unit of the next matched collective of the rank after each row; -1 for none."""
    rank, start = (table[c].to_numpy(np.int64) for c in ("rank", "start_ns"))
    unit = np.full(len(table), -1, dtype=np.int64)
    for one, mine in marks.groupby("rank", sort=False):
        ordered = mine.sort_values("start_ns", kind="stable")
        known = np.append(ordered["unit"].to_numpy(np.int64), -1)
        of_rank = rank == one
        at = np.searchsorted(ordered["start_ns"].to_numpy(np.int64), start[of_rank], side="right")
        unit[of_rank] = known[at]
    return unit


def _launches(
    kernels: pd.DataFrame, chosen: Bools, places: tuple[Int64s, Int64s, Int64s]
) -> pd.DataFrame:
    """Return computation with its places in ranks and units, and a key for name and grid."""
    ranks, units, unit = places
    rows = np.flatnonzero(chosen & np.isin(kernels["rank"].to_numpy(np.int64), ranks))
    mine = kernels.iloc[rows]
    keys: Any = ["name", "grid", "block"]
    launches: pd.DataFrame = pd.DataFrame(
        {
            "rank": np.searchsorted(ranks, mine["rank"].to_numpy(np.int64)),
            "unit": np.searchsorted(units, unit[rows]),
            "key": mine.groupby(keys, observed=True, dropna=False, sort=False).ngroup().to_numpy(),
            "duration_ns": mine["duration_ns"].to_numpy(np.int64),
        }
    )
    return launches


def _has_grids(kernels: pd.DataFrame, is_computation: Bools) -> bool:
    """Tell whether most of the computation has its grid."""
    duration = kernels["duration_ns"].to_numpy(float)
    known = kernels["grid"].notna().to_numpy(bool)
    return bool(duration[known & is_computation].sum() > 0.5 * duration[is_computation].sum())


def _cause(spent: _Spent, rank: int | None, of: frozenset[int]) -> LateCause:
    """Return why the late ones among some ranks were so."""
    chosen = np.isin(spent.ranks, sorted(of))
    if not chosen.any():
        return LateCause(rank, "inconclusive", why_not="the rank was not recorded in detail")
    has_base = (~spent.is_late).any(axis=0)
    late: Bools = spent.is_late & chosen[:, None]
    late &= has_base
    if not late.any():
        why = "no rank in detail was in time in the same steps"
        return LateCause(rank, "inconclusive", why_not=why)
    longer = {
        part: _longer(time_ns, spent.is_late, late) for part, time_ns in spent.time_ns.items()
    }
    if rank is None:
        usual = {p: _usual(time_ns, spent.is_late, late) for p, time_ns in spent.time_ns.items()}
        longer = {part: longer[part] - usual[part] for part in PARTS}
    found = LateCause(rank, "inconclusive", longer, num_late=int(late.sum()))
    total = sum(max(ns, 0.0) for ns in longer.values())
    by_cause: dict[Cause, float] = {}
    for part, ns in longer.items():
        cause = OF_PART.get(part, "inconclusive")
        by_cause[cause] = by_cause.get(cause, 0.0) + max(ns, 0.0)
    largest = max(by_cause, key=by_cause.__getitem__)
    if by_cause[largest] < MOST * total or largest == "inconclusive":
        return replace(found, why_not="no part of the time has most of what it was longer by")
    if largest != "compute":
        return replace(found, cause=largest)
    return _computation(spent, late, found)


def _longer(time_ns: Floats, is_late: Bools, late: Bools) -> float:
    """Return by how much a part is longer in late units than on ranks in time, in the mean."""
    in_time = np.where(is_late, 0.0, time_ns).sum(axis=0) / np.maximum((~is_late).sum(axis=0), 1)
    return float((time_ns - in_time)[late].mean())


def _usual(time_ns: Floats, is_late: Bools, late: Bools) -> float:
    """Return the same of the units in which these ranks are in time, weighted as they are late."""
    number = (~is_late).sum(axis=0)
    in_time = np.where(is_late, 0.0, time_ns).sum(axis=0) / np.maximum(number, 1)
    excess = np.where(is_late, 0.0, time_ns - in_time).sum(axis=1)
    usual = excess / np.maximum((~is_late).sum(axis=1), 1)
    return float(np.average(usual, weights=late.sum(axis=1)))


def _computation(spent: _Spent, late: Bools, found: LateCause) -> LateCause:
    """Tell a slower GPU from more work: the first runs the same launches, all of them slower."""
    if not spent.has_grids:
        return replace(found, cause="compute")
    launches = spent.launches
    key, rank, unit, duration = (
        launches[c].to_numpy(np.int64) for c in ("key", "rank", "unit", "duration_ns")
    )
    in_time: Bools = ~spent.is_late
    in_time &= late.any(axis=0, keepdims=True)
    # By kernel and grid, in the mean of the late cells, and of those in time.
    (time_ns, num), (usual_ns, usual_num) = (
        [
            np.bincount(key[mine], weights, minlength=key.max() + 1) / max(cells.sum(), 1)
            for weights in (duration[mine], None)
        ]
        for cells in (late, in_time)
        for mine in [cells[rank, unit]]
    )
    calls = np.minimum(num, usual_num)
    known = calls > 0
    now, usual = (
        np.divide(ns, number, out=np.zeros_like(calls), where=known)
        for ns, number in ((time_ns, num), (usual_ns, usual_num))
    )
    slower, alike_ns = calls * (now - usual), calls * usual
    share = float(slower.sum() / max(found.longer_ns[COMPUTE], 1.0))
    found = replace(found, cause="compute", same_launches_share=share)
    if share < SAME_LAUNCHES:
        return found
    is_slower = slower >= 0.5 * slower.sum() / alike_ns.sum() * alike_ns
    is_broad = alike_ns[is_slower & known].sum() >= BROAD * alike_ns.sum()
    return replace(found, cause="clock") if is_broad else found
