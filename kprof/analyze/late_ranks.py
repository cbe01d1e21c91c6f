"""Late ranks: by how much each delays the collectives, how often.

A collective ends on all its ranks together, so a rank's wait in it is its duration beyond the
shortest one: no clock is compared with another. Lateness is judged in units: steps, or parts of
the window where fewer than three steps are marked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kprof.analyze.attribution.steps import outside_steps
from kprof.analyze.groupings import measure_elapsed
from kprof.analyze.idle.causes import collective_waits
from kprof.analyze.rank_layout import PIPELINE, places, what_they_share
from kprof.trace import Meta, Trace, once_per_trace

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

FEWEST_STEPS = 3
MOST_PARTS = 20
# The rank that comes at this quantile of a group is in time: a quarter may come earlier.
IN_TIME = 0.75
# A rank is late in a unit by so much of its time, clear of what ranks differ by anyway; a tenth of
# a unit is late in any case.
LEAST_LATE = 0.02
CLEAR_OF_SCATTER = 4.5
LATE_ANYWAY = 0.1
# A rank is a straggler if late in so many of the units, or in more than chance has it.
ALWAYS = 0.8
SOMETIMES = 0.15
FEWEST_TIMES = 3
CHANCE = 0.01
# Stragglers stand apart from the ranks next to them by so much of what all ranks span: where work
# grows from rank to rank, none does.
APART = 0.2
# A host or process group is named where so many of its ranks are late.
MOST_OF_GROUP = 0.75
# Lateness rotates where so many units have a late rank, by so much of the scatter or of a unit.
LEAST_ROTATING = 0.25
ROTATING_CLEAR_OF_SCATTER = 6.0
ROTATING_ANYWAY = 0.2


@dataclass(frozen=True)
class RankLateness:
    """How one rank kept up with the others in the collectives; times in ns per unit."""

    rank: int
    host: str | None
    waits_ns: float
    """Its mean time in collectives with nothing else to do until the last rank came."""
    late_ns: float
    """How much later than a rank in time it comes to them, in the mean; negative: earlier."""
    num_late: int
    """Units in which it was late."""
    late_in: tuple[int, ...] = ()
    """Which units those are: numbers of steps as the workload counts them, or of parts from 0."""
    late_by_ns: tuple[int, ...] = ()
    """How late it came in each unit, as `late_ns`, in whole ns."""


@dataclass(frozen=True)
class Lateness:
    """The waits between ranks in a recording of several ranks."""

    ranks: tuple[RankLateness, ...]
    stragglers: tuple[int, ...]
    """Ranks that others wait for again and again; none is hidden by another."""
    where: str | None
    """What they alone share: host, pipeline stage, process group; None where there is nothing."""
    lost_ns: float
    """Time by which a unit would be shorter with the stragglers in time; 0 without stragglers."""
    rotating_ns: float
    """Time that a unit loses to ranks that are late in turn; 0 where lateness does not rotate."""
    num_rotating: int
    """Ranks that are late in turn."""
    num_units: int
    unit_ns: float
    """Mean time of a unit."""
    are_steps: bool
    """Whether units are steps."""
    units: tuple[int, ...] = ()
    """Their numbers: of steps as the workload counts them, or of parts of the window from 0."""
    lost_by_ns: tuple[int, ...] = ()
    """Time that each unit loses to the stragglers, else to ranks late in turn, in whole ns."""


def waits_by_unit(trace: Trace) -> tuple[pd.DataFrame, bool] | None:
    """Return `collective_waits` of all ranks with a column `unit`, and whether units are steps.

    A unit has the number of its step, or of its part of the window. Collectives in no unit are left
    out. None where no collective was recorded on several ranks.
    """
    waits = collective_waits(trace.all_ranks or trace)
    if waits is None:
        return None
    unit, are_steps = _units(waits)
    return waits.assign(unit=unit)[unit >= 0], are_steps


@once_per_trace
def find_lateness(trace: Trace) -> Lateness | None:
    """Return who waits for whom; None where no collective was recorded on several ranks."""
    trace = trace.all_ranks or trace
    found = waits_by_unit(trace)
    if found is None:
        return None
    waits, are_steps = found
    ranks, at_rank = np.unique(waits["rank"].to_numpy(np.int64), return_inverse=True)
    units, at_unit = np.unique(waits["unit"].to_numpy(np.int64), return_inverse=True)
    waits, num_units = waits.assign(unit=at_unit), len(units)
    groups = _by_group(waits, at_rank, (len(ranks), num_units))
    unit_ns = _elapsed_ns(trace, are_steps=are_steps) / num_units
    late_ns = _lateness(groups)
    is_late = late_ns >= _least_late(late_ns, unit_ns)
    chosen = _stragglers(late_ns, is_late, num_units)
    hosts = dict(trace.meta.hosts)
    names = [hosts.get(rank) for rank in ranks.tolist()]
    chosen = _whole_parts(chosen, late_ns.mean(axis=1), names)
    stage = {rank: place.get(PIPELINE) for rank, place in places(trace.meta).items()}
    stages = [stage.get(rank) for rank in ranks.tolist()]
    chosen = _whole_parts(chosen, late_ns.mean(axis=1), stages)
    in_turn, num_rotating = _rotating(groups, late_ns, chosen, unit_ns)
    lost = _lost_ns(groups, chosen)
    total = np.sum([table for _, table in groups], axis=0)
    return Lateness(
        ranks=tuple(
            RankLateness(
                rank,
                host,
                float(total[i].mean()),
                float(late_ns[i].mean()),
                int(is_late[i].sum()),
                tuple(units[is_late[i]].tolist()),
                tuple(np.rint(late_ns[i]).astype(np.int64).tolist()),
            )
            for i, (rank, host) in enumerate(zip(ranks.tolist(), names, strict=True))
        ),
        stragglers=tuple(ranks[chosen].tolist()),
        where=_shared(ranks, chosen, trace.meta, waits),
        lost_ns=float(lost.mean()),
        rotating_ns=float(in_turn.mean()),
        num_rotating=num_rotating,
        num_units=num_units,
        unit_ns=unit_ns,
        are_steps=are_steps,
        units=tuple(units.tolist()),
        lost_by_ns=tuple(np.rint(lost if chosen.any() else in_turn).astype(np.int64).tolist()),
    )


def _units(waits: pd.DataFrame) -> tuple[NDArray[np.int64], bool]:
    """Return the unit of each collective, -1 for none: its step, or its part of the window."""
    together = waits.groupby(["group", "number", "collective"], observed=True, sort=False)
    step = together["step"].transform("min")
    steps = np.unique(step.dropna().to_numpy(np.int64))
    if len(steps) >= FEWEST_STEPS:
        return step.to_numpy(np.int64, na_value=-1), True
    start = together["start_ns"].transform("min").to_numpy(np.int64)
    at = np.unique(start, return_inverse=True)[1]
    number = int(at.max()) + 1
    return np.asarray(at * min(number, MOST_PARTS) // number), False


def _elapsed_ns(trace: Trace, *, are_steps: bool) -> float:
    """Return the time of all units together: of all steps, or of the window."""
    ranges = trace.ranges
    is_lead = outside_steps(trace)
    elapsed = measure_elapsed(trace.kernels[~is_lead] if is_lead.any() else trace.kernels)
    if not are_steps or not len(ranges):
        return float(elapsed)
    steps = ranges[(ranges["kind"] == "step").to_numpy(bool)]
    return float(max(elapsed, steps.groupby("rank")["duration_ns"].sum().max()))


def _by_group(
    waits: pd.DataFrame, at_rank: NDArray[np.intp], shape: tuple[int, int]
) -> list[tuple[NDArray[np.intp], Floats]]:
    """Return for each process group its ranks' places, and every rank's waits in it by unit."""
    found = []
    exposed, unit = (waits[c].to_numpy(np.int64) for c in ("exposed_ns", "unit"))
    codes = waits["group"].cat.codes.to_numpy()
    for code in np.unique(codes):
        mine = codes == code
        table = np.zeros(shape)
        np.add.at(table, (at_rank[mine], unit[mine]), exposed[mine])
        found.append((np.unique(at_rank[mine]), table))
    return found


def _lateness(groups: list[tuple[NDArray[np.intp], Floats]]) -> Floats:
    """Return how late each rank came in each unit, by the group in which it came latest.

    A rank that itself waits in one group is late in others for no reason of its own.
    """
    total = np.sum([table for _, table in groups], axis=0)
    late = np.full(total.shape, -np.inf)
    for members, table in groups:
        own = table[members]
        in_time = np.sort(own, axis=0)[int(IN_TIME * len(members) - 0.5)]
        excused = total[members] - own
        late[members] = np.maximum(late[members], in_time - own - excused)
    return late


def _scatter(late_ns: Floats) -> float:
    """Return the spread of ranks and units that stragglers, constant or in turn, do not widen."""
    of_rank = np.abs(late_ns - np.median(late_ns, axis=1, keepdims=True))
    of_unit = np.abs(late_ns - np.median(late_ns, axis=0, keepdims=True))
    return 1.4826 * float(min(np.median(of_rank), np.median(of_unit)))


def _least_late(late_ns: Floats, unit_ns: float) -> float:
    clear = min(CLEAR_OF_SCATTER * _scatter(late_ns), LATE_ANYWAY * unit_ns)
    return max(LEAST_LATE * unit_ns, clear)


def _stragglers(late_ns: Floats, is_late: Bools, num_units: int) -> Bools:
    """Tell which ranks are late again and again, and stand apart from all others."""
    times = is_late.sum(axis=1)
    number = len(times)
    is_always = times >= ALWAYS * num_units
    # How often chance makes a rank late, all others but those that always are tell.
    others = times[~is_always].sum() - times
    usual = np.maximum(others, 0.5) / max(number - is_always.sum() - 1, 1)
    chances = map(poisson_tail, np.maximum(times - 1, 0).tolist(), usual.tolist())
    is_unlikely = np.array([*chances]) <= CHANCE / number
    is_often = (times >= max(FEWEST_TIMES, SOMETIMES * num_units)) & is_unlikely
    candidates = (is_often | is_always) & (num_units >= FEWEST_STEPS)
    mean = late_ns.mean(axis=1)
    order = np.argsort(-mean, kind="stable")
    chosen = np.zeros(number, dtype=bool)
    for last in range(number // 2, 0, -1):
        first_left_out = mean[order[last]]
        is_apart = mean[order[last - 1]] - first_left_out >= APART * np.ptp(mean)
        if is_apart and candidates[order[:last]].all():
            chosen[order[:last]] = True
            break
    return chosen


def poisson_tail(number: int, mean: float) -> float:
    """Return the probability that a Poisson variable with this mean, above 0, exceeds `number`.

    The sum of its terms, on the side of the mean on which they fall. To import `scipy.special`
    takes longer than all that is told of late ranks.
    """
    above = number >= mean
    count = number + 1 if above else number
    term = math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))
    terms: list[float] = []
    while term > 0 and (not terms or term > terms[0] * np.finfo(float).eps):
        terms.append(term)
        term *= mean / (count + 1) if above else count / mean
        count += 1 if above else -1
    total = math.fsum(terms)
    return total if above else 1 - total


def _whole_parts(chosen: Bools, mean: Floats, parts: Sequence[str | int | None]) -> Bools:
    """Add ranks of a host or stage that are hardly less late than most of its ranks, which are."""
    chosen = chosen.copy()
    for part in {one for one in parts if one is not None}:
        own = np.array([one == part for one in parts])
        if chosen[own].mean() >= MOST_OF_GROUP and own.sum() <= len(own) // 2:
            chosen |= own & (mean >= np.median(mean[own & chosen]) / 2)
    return chosen


def _lost_ns(groups: list[tuple[NDArray[np.intp], Floats]], chosen: Bools) -> Floats:
    """Return what each unit would be shorter by, were the chosen ranks in time with the next."""
    lost = np.zeros(groups[0][1].shape[1])
    for members, table in groups:
        others = members[~chosen[members]]
        if len(others):
            gain = table[others].min(axis=0) - table[members].min(axis=0)
            lost = np.maximum(lost, gain)
    return lost


def _rotating(
    groups: list[tuple[NDArray[np.intp], Floats]], late_ns: Floats, chosen: Bools, unit_ns: float
) -> tuple[Floats, int]:
    """Return what each unit loses to ranks that are late in turn, and how many those are."""
    # A rank's lateness in most units does not rotate.
    usual = np.quantile(late_ns, 0.25, axis=1, keepdims=True)
    others = np.maximum(late_ns - usual, 0)[~chosen]
    clear = min(ROTATING_CLEAR_OF_SCATTER * _scatter(late_ns), ROTATING_ANYWAY * unit_ns)
    least = max(LEAST_LATE * unit_ns, clear)
    is_late = others >= least
    affected = is_late.any(axis=0)
    num_ranks = int(is_late.any(axis=1).sum())
    often = max(FEWEST_STEPS, LEAST_ROTATING * late_ns.shape[1])
    if affected.sum() < often or num_ranks < 2:
        return np.zeros(late_ns.shape[1]), 0
    return np.where(affected, others.max(axis=0), 0.0), num_ranks


def _shared(ranks: NDArray[np.int64], chosen: Bools, meta: Meta, waits: pd.DataFrame) -> str | None:
    """Return the host, stage or process group whose ranks are just the chosen ones, if one is."""
    if not chosen.any():
        return None
    named = dict(meta.hosts)
    hosts = [named.get(rank) for rank in ranks.tolist()]
    own = {name for name, is_chosen in zip(hosts, chosen, strict=True) if is_chosen}
    others = {name for name, is_chosen in zip(hosts, chosen, strict=True) if not is_chosen}
    if None not in own and len(own) == 1 and not own & others:
        return f"host {own.pop()}"
    wanted = set(ranks[chosen].tolist())
    if (found := what_they_share(wanted, ranks.tolist(), meta)) is not None:
        return found
    members: Any = waits.groupby("group", observed=True)["rank"].unique()
    for group, those in members.items():
        if len(wanted) > 1 and set(those.tolist()) == wanted:
            return f"process group {group}"
    return None
