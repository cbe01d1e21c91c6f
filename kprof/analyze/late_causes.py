"""Causes of lateness: where late ranks spend the time by which they come after the others.

From one matched collective to the next, all ranks of a process group take equally long. This time
is computation, communication, idle time by cause, and waiting. A late rank waits less, so by as
much some of the others are longer; these are compared with ranks that were in time in the same
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kprof.analyze.attribution.overlap import allotted_time
from kprof.analyze.idle import causes
from kprof.analyze.late_ranks import Lateness, find_lateness, waits_by_unit
from kprof.trace import LateTime, LaunchTime, Trace, once_per_trace

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
# Launches are alike by these columns.
KEYS = ("name", "grid", "block")


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
    others = {one.rank: one for one in trace.meta.late_times}
    return tuple(
        _cause(spent, rank, of, None if rank is None else others.get(rank)) for rank, of in groups
    )


@dataclass(frozen=True)
class _Spent:
    """The time of ranks in detail by unit and part, each until the unit's collectives."""

    ranks: Int64s
    units: Int64s
    is_late: Bools
    """By rank and unit."""
    time_ns: dict[str, Floats]
    """Of each part, by rank and unit."""
    launches: pd.DataFrame
    """Computation: places in `ranks` and in units, `name`, `grid`, `block`, `duration_ns`."""
    has_grids: bool

    @property
    def has_base(self) -> Bools:
        """Tell in which units a rank is in time."""
        return np.asarray((~self.is_late).any(axis=0))

    @property
    def in_time_ns(self) -> dict[str, Floats]:
        """The mean time of the ranks in time, of each part by unit."""
        number = np.maximum((~self.is_late).sum(axis=0), 1)
        return {
            part: np.where(self.is_late, 0.0, time_ns).sum(axis=0) / number
            for part, time_ns in self.time_ns.items()
        }


@dataclass(frozen=True)
class _Late:
    """The time of late ranks, a value for each unit in which one was late."""

    at_unit: Int64s
    """Places in the units."""
    time_ns: dict[str, Floats]
    """Of each part."""
    launches: pd.DataFrame
    """Computation added up: `name`, `grid`, `block`, `number`, `time_ns`."""


def late_time(
    trace: Trace, waits: pd.DataFrame, rank: int, units: Sequence[int]
) -> LateTime | None:
    """Return how a rank spent the time of some units, for `find_late_causes` without its tables.

    `trace` holds the rank, analyzed without the others, and `waits` those of the rank by unit. None
    where its collectives are not those of the trace.
    """
    marks = _in_detail(trace.kernels, waits, rank)
    if marks is None:
        return None
    spent = _spent_until(trace, marks, {})
    row = int(np.searchsorted(spent.ranks, rank))
    chosen = np.flatnonzero(np.isin(spent.units, list(units)))
    is_late = np.zeros_like(spent.is_late)
    is_late[row, chosen] = True
    launches = _added_up(spent.launches, is_late) if spent.has_grids else None
    return LateTime(
        rank,
        tuple(spent.units[chosen].tolist()),
        {part: tuple(ns[row, chosen].astype(int).tolist()) for part, ns in spent.time_ns.items()},
        ()
        if launches is None
        else tuple(LaunchTime(*one) for one in launches.itertuples(index=False)),
    )


def _spent(trace: Trace, found: Lateness) -> _Spent | None:
    marks = _marks(trace)
    late_in = {one.rank: one.late_in for one in found.ranks}
    return None if marks is None else _spent_until(trace, marks, late_in)


def _spent_until(trace: Trace, marks: pd.DataFrame, late_in: dict[int, tuple[int, ...]]) -> _Spent:
    """Add up the time until the matched collectives of each unit."""
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
    return _Spent(
        ranks=ranks,
        units=units,
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
    """Return computation with its places in ranks and units."""
    ranks, units, unit = places
    rows = np.flatnonzero(chosen & np.isin(kernels["rank"].to_numpy(np.int64), ranks))
    mine = kernels.iloc[rows]
    launches: pd.DataFrame = mine[[*KEYS, "duration_ns"]].assign(
        rank=np.searchsorted(ranks, mine["rank"].to_numpy(np.int64)),
        unit=np.searchsorted(units, unit[rows]),
    )
    return launches


def _added_up(launches: pd.DataFrame, cells: Bools) -> pd.DataFrame:
    """Add up computation in some ranks and units: `KEYS`, `number`, `time_ns`."""
    rank, unit = (launches[c].to_numpy(np.int64) for c in ("rank", "unit"))
    keys: Any = list(KEYS)
    groups = launches[cells[rank, unit]].groupby(keys, observed=True, dropna=False, sort=False)
    sums: pd.DataFrame = groups["duration_ns"].agg(["size", "sum"]).reset_index()
    sums.columns = pd.Index([*KEYS, "number", "time_ns"])
    texts = sums[list(KEYS)].astype(object)
    sums[list(KEYS)] = texts.where(texts.notna(), None)
    return sums


def _has_grids(kernels: pd.DataFrame, is_computation: Bools) -> bool:
    """Tell whether most of the computation has its grid."""
    duration = kernels["duration_ns"].to_numpy(float)
    known = kernels["grid"].notna().to_numpy(bool)
    return bool(duration[known & is_computation].sum() > 0.5 * duration[is_computation].sum())


def _cause(
    spent: _Spent, rank: int | None, of: frozenset[int], elsewhere: LateTime | None
) -> LateCause:
    """Return why the late ones among some ranks were so."""
    chosen = np.isin(spent.ranks, sorted(of))
    if not chosen.any() and elsewhere is None:
        return LateCause(rank, "inconclusive", why_not="the rank was not recorded in detail")
    late = _of_tables(spent, chosen) if chosen.any() else _of_another(spent, elsewhere)
    if late is None:
        why = "no rank in detail was in time in the same steps"
        return LateCause(rank, "inconclusive", why_not=why)
    in_time_ns = spent.in_time_ns
    longer = {
        part: float((time_ns - in_time_ns[part][late.at_unit]).mean())
        for part, time_ns in late.time_ns.items()
    }
    if rank is None:
        is_late = spent.is_late & chosen[:, None] & spent.has_base
        usual = {p: _usual(time_ns, spent.is_late, is_late) for p, time_ns in spent.time_ns.items()}
        longer = {part: longer[part] - usual[part] for part in PARTS}
    found = LateCause(rank, "inconclusive", longer, num_late=len(late.at_unit))
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


def _of_tables(spent: _Spent, chosen: Bools) -> _Late | None:
    """Return the late time of ranks in detail; None where no rank was in time beside them."""
    cells = spent.is_late & chosen[:, None] & spent.has_base
    if not cells.any():
        return None
    return _Late(
        at_unit=np.nonzero(cells)[1],
        time_ns={part: time_ns[cells] for part, time_ns in spent.time_ns.items()},
        launches=_added_up(spent.launches, cells),
    )


def _of_another(spent: _Spent, elsewhere: LateTime | None) -> _Late | None:
    """Return the late time of a rank that is not in detail, likewise."""
    if elsewhere is None:
        return None
    units = np.array(elsewhere.units, dtype=np.int64)
    at = np.searchsorted(spent.units, units)
    known = np.isin(units, spent.units)
    known[known] = spent.has_base[at[known]]
    if not known.any():
        return None
    rows = [(one.name, one.grid, one.block, one.number, one.time_ns) for one in elsewhere.launches]
    return _Late(
        at_unit=at[known],
        time_ns={
            part: np.array(elsewhere.time_ns.get(part, (0,) * len(units)), dtype=float)[known]
            for part in PARTS
        },
        launches=pd.DataFrame(rows, columns=[*KEYS, "number", "time_ns"]),
    )


def _usual(time_ns: Floats, is_late: Bools, late: Bools) -> float:
    """Return by how much these ranks are longer in units in which they are in time.

    Weighted as they are late.
    """
    number = (~is_late).sum(axis=0)
    in_time = np.where(is_late, 0.0, time_ns).sum(axis=0) / np.maximum(number, 1)
    excess = np.where(is_late, 0.0, time_ns - in_time).sum(axis=1)
    usual = excess / np.maximum((~is_late).sum(axis=1), 1)
    return float(np.average(usual, weights=late.sum(axis=1)))


def _computation(spent: _Spent, late: _Late, found: LateCause) -> LateCause:
    """Tell a slower GPU from more work: the first runs the same launches, all of them slower."""
    if not spent.has_grids or not len(late.launches):
        return replace(found, cause="compute")
    in_time: Bools = ~spent.is_late
    in_time &= np.isin(np.arange(len(spent.units)), late.at_unit)
    # By kernel and grid, in the mean of the late units, and of the ranks in time.
    keys: Any = list(KEYS)
    both = late.launches.merge(_added_up(spent.launches, in_time), on=keys, suffixes=("", "_usual"))
    num, time_ns = (both[c].to_numpy(float) / len(late.at_unit) for c in ("number", "time_ns"))
    usual_num, usual_ns = (
        both[c].to_numpy(float) / max(in_time.sum(), 1) for c in ("number_usual", "time_ns_usual")
    )
    calls = np.minimum(num, usual_num)
    now, usual = time_ns / num, usual_ns / usual_num
    slower, alike_ns = calls * (now - usual), calls * usual
    share = float(slower.sum() / max(found.longer_ns[COMPUTE], 1.0))
    found = replace(found, cause="compute", same_launches_share=share)
    if share < SAME_LAUNCHES:
        return found
    is_slower = slower >= 0.5 * slower.sum() / alike_ns.sum() * alike_ns
    is_broad = alike_ns[is_slower].sum() >= BROAD * alike_ns.sum()
    return replace(found, cause="clock") if is_broad else found
