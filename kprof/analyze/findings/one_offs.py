"""Start-up: idle time that happened once, and is not part of future steps.

With at least three steps, it is the time by which one step exceeds all others: a first use, a cold
allocator or cache, a final copy. The device may wait longer in that step only because nothing was
queued: where it waits for the same in every step, no more counts than the host took longer as well.
With fewer steps, only work known by name counts: modules loaded, memory allocated, graphs captured,
code compiled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from kprof.analyze.attribution.overlap import rows_by
from kprof.analyze.attribution.steps import (
    denominator,
    find_lead,
    number_in,
    outside_steps,
    step_rows,
)
from kprof.analyze.groupings import number_rows
from kprof.analyze.idle import causes
from kprof.analyze.idle.host_state import Host, find_host
from kprof.analyze.intervals import NOTHING, Intervals, disjoint, length_in
from kprof.findings import StartUp
from kprof.trace import Trace, once_per_trace

ENOUGH_STEPS = 3
# Between two launches the host takes some µs. After a silence of so much it did something else.
SILENCE_NS = 5_000_000
# Steps vary by less than this share of the next longest.
LEAST_EXCESS = 0.25
# Work of one step alone is so many times what any other step did alone.
OUTSTANDS = 4
# Less than this share of the window is not worth a line.
LEAST_SHARE = 0.005
# A name that goes on to the second half of a window, this often, is no start-up.
OFTEN = 3
LOADING, ALLOCATION, CAPTURE, COMPILATION = (
    *("module loading", "memory allocation"),
    *("graph capture", "compilation"),
)
COMPILING = r"\(dynamo_timed\)$|^_compile\.compile_inner|^compile_fx"
NAMES = {
    LOADING: r"^(?:cu|hip)(?:Module|Library)(?:Load|GetFunction|GetKernel)|^cuLink|^cuInit$",
    ALLOCATION: causes.ALLOCATING_CALL,
    CAPTURE: r"^(?:cuda|cu|hip)(?:Stream(?:Begin|End)Capture|Graph(?:Instantiate|Upload))",
    COMPILATION: rf"{COMPILING}|^(?:nvrtc|hiprtc)Compile"
    r"|^triton/(?:compiler/compiler|runtime/build)\.py|^torch/_inductor/compile_fx\.py"
    r"|^torch/utils/cpp_extension\.py",
}


@dataclass(frozen=True)
class Once:
    """For each row of `idle`, how much is start-up, and the place of its name or `NOTHING`."""

    ns: np.ndarray
    name: np.ndarray


@once_per_trace
def without_start_up(trace: Trace) -> tuple[Trace, tuple[StartUp, ...]]:
    """Return the trace whose idle time holds no start-up, and what that was.

    Rows keep their places. What happened once has no cause and nothing to gain any more.
    """
    once = find_once(trace)
    if not once.ns.any():
        return trace, ()
    idle = trace.idle
    took = idle["duration_ns"].to_numpy(np.int64) - once.ns
    gained = idle["recoverable_ns"]
    steady = idle.assign(
        duration_ns=took,
        recoverable_ns=(gained - once.ns).clip(lower=0).astype(gained.dtype),
        cause=idle["cause"].where(took > 0),
    )
    return replace(trace, idle=steady), _listed(trace, once)


@once_per_trace
def find_once(trace: Trace) -> Once:
    """Find the idle time that is start-up."""
    idle = trace.idle
    nothing = np.zeros(len(idle), dtype=np.int64)
    if trace.is_host_only or idle.empty:
        return Once(nothing, np.full(len(idle), NOTHING, dtype=np.int64))
    name = _names(trace)
    found = Once(nothing, name)
    took = idle["duration_ns"].to_numpy(np.int64)
    steps = _steps_of(trace)
    device = number_rows(idle, ["rank", "device"])
    cause = idle["cause"].cat.codes.to_numpy(np.int64)
    is_asked = (~idle["cause"].isin(causes.BESIDES)).to_numpy(bool)
    number = count_steps_of_window(trace)
    for one in np.unique(device):
        for each in np.unique(cause[(device == one) & is_asked]):
            rows = np.flatnonzero((device == one) & (cause == each) & is_asked)
            if number >= ENOUGH_STEPS:
                spent = _spent_by_host(trace, rows, steps[rows])
                found.ns[rows] = _excess(took[rows], steps[rows], number, spent)
                continue
            # A call of one name that goes on does not make the others go on.
            for what in np.unique(name[rows[name[rows] != NOTHING]]):
                named = rows[name[rows] == what]
                found.ns[named] = _named_once(trace, took[named], steps[named], named, number)
    return found


@once_per_trace
def work_once(trace: Trace) -> np.ndarray:
    """Tell which activities belong to work that one step alone did, such as a copy at the end.

    With at least three steps: what no other step ran, where it takes a large part of a step, and
    several times what any other step ran alone.
    """
    kernels = trace.kernels
    is_once = np.zeros(len(kernels), dtype=bool)
    if trace.is_host_only or count_steps_of_window(trace) < ENOUGH_STEPS:
        return is_once
    in_steps = np.flatnonzero(kernels["step"].notna().to_numpy(bool) & ~outside_steps(trace))
    rows = kernels.iloc[in_steps]
    what = rows.groupby(
        ["rank", "device", "name", "copied_bytes"], dropna=False, observed=True, sort=False
    )
    is_alone = (what["step"].transform("nunique") == 1).to_numpy(bool)
    took = rows["duration_ns"].to_numpy(np.int64)
    step = rows["step"].to_numpy(np.int64)
    for mine in rows_by(rows, "rank", "device"):
        numbers, of = np.unique(step[mine], return_inverse=True)
        if len(numbers) < ENOUGH_STEPS:
            continue
        whole = np.bincount(of, took[mine], len(numbers))
        alone = np.bincount(of, took[mine] * is_alone[mine], len(numbers))
        most = int(alone.argmax())
        others = np.delete(whole - alone, most)
        next_most = np.delete(alone, most).max()
        if alone[most] > max(LEAST_EXCESS * others.max(), OUTSTANDS * next_most):
            chosen = mine[(of == most) & is_alone[mine]]
            is_once[in_steps[chosen]] = True
    return is_once


def _named_once(
    trace: Trace, took: np.ndarray, steps: np.ndarray, rows: np.ndarray, number: int
) -> np.ndarray:
    """Return how much of what is known by name is start-up, in a window of fewer than three steps.

    The same in each of two steps is none; nor, without steps, what goes on through the window. But
    each module is loaded once, whenever its first kernel is launched.
    """
    if number > 1 and (steps != NOTHING).any():
        return _excess(took, steps, number)
    start = trace.idle["start_ns"].to_numpy(np.int64)
    first, last = int(start.min()), int((start + trace.idle["duration_ns"].to_numpy()).max())
    begins = start[rows] - first
    is_loading = _names(trace)[rows[:1]] == list(NAMES).index(LOADING)
    if is_loading.any():
        return took
    goes_on = number == 0 and len(rows) >= OFTEN and 2 * int(begins.max()) > last - first
    return np.zeros_like(took) if goes_on else took


def _excess(
    took: np.ndarray, steps: np.ndarray, number: int, spent: dict[int, int] | None = None
) -> np.ndarray:
    """Return how much of each piece lies beyond what every other step has, longest pieces first.

    `number` steps were recorded. Where the others differ by as much, it is how steps vary. `spent`:
    how long the host spent on their cause in each step, where that was recorded.
    """
    once = np.zeros_like(took)
    known = steps != NOTHING
    numbers, of = np.unique(steps[known], return_inverse=True)
    sums = np.zeros(max(number, len(numbers)), dtype=np.int64)
    np.add.at(sums, of, took[known])
    if len(sums) < 2:
        return once
    most = int(sums.argmax())
    others = np.delete(sums, most)
    excess = int(sums[most] - others.max())
    varies = max(int(np.ptp(others)), round(LEAST_EXCESS * int(others.max())))
    if excess <= varies or most >= len(numbers):
        return once
    if spent is not None and others.min() > 0:
        of_others = [ns for step, ns in spent.items() if step != numbers[most]]
        excess = min(excess, max(spent.get(int(numbers[most]), 0) - max(of_others, default=0), 0))
    rows = np.flatnonzero(steps == numbers[most])
    rows = rows[np.argsort(-took[rows], kind="stable")]
    before = np.cumsum(took[rows]) - took[rows]
    once[rows] = np.clip(excess - before, 0, took[rows])
    return once


def _spent_by_host(trace: Trace, rows: np.ndarray, steps: np.ndarray) -> dict[int, int] | None:
    """Return by step how long the host spent on the cause of these idle pieces of one device.

    None where it does not tell: how long a call waits depends on the device.
    """
    idle, host = trace.idle.iloc[rows], find_host(trace)
    cause = str(idle["cause"].iloc[0])
    is_of_rank = host.rank == int(idle["rank"].iloc[0])
    marks = step_rows(trace.ranges)
    marks = marks[is_of_rank[marks]]
    begins, ends = host.start[marks], host.end[marks]
    named = _rows_of_cause(trace, cause)
    calls = np.flatnonzero((trace.ranges["kind"] == "runtime").to_numpy(bool) & is_of_rank)
    if named is not None:
        spent = length_in(_union(host, named[is_of_rank[named]]), begins, ends)
    elif cause == causes.LAUNCH_BOUND and len(calls):
        other = np.concatenate([host.rows[layer] for layer in ("loaded", "waited", "profiler")])
        union = _union(host, np.concatenate([calls, other[is_of_rank[other]]]))
        spent = ends - begins - length_in(union, begins, ends)
    else:
        return None
    found = pd.Series(spent).groupby([_number(trace, row) for row in marks.tolist()]).sum()
    if named is None:
        # A call waits for room in a queue only while the device is busy.
        start = idle["start_ns"].to_numpy(np.int64)
        end = start + idle["duration_ns"].to_numpy(np.int64)
        in_calls = pd.Series(length_in(_union(host, calls), start, end)).groupby(steps).sum()
        found = found.add(in_calls, fill_value=0)
    return {int(step): int(ns) for step, ns in found.items()}


def _rows_of_cause(trace: Trace, cause: str) -> np.ndarray | None:
    """Return the rows of `ranges` in which the host spends its time on a cause; None: it waits."""
    host = find_host(trace)
    if cause == causes.DATA_LOADING:
        return host.rows["loaded"]
    if cause in (causes.ALLOCATOR, causes.PAGEABLE_COPY):
        return np.asarray(host.blocking.index[host.blocking == cause], dtype=np.int64)
    return None


def _union(host: Host, rows: np.ndarray) -> Intervals:
    return disjoint(Intervals(host.start[rows], host.end[rows], rows))


def _number(trace: Trace, row: int) -> int:
    return number_in(str(trace.ranges["name"].iloc[row]))


def _steps_of(trace: Trace) -> np.ndarray:
    """Return for each row of `idle` the step of the activity that ended it, or `NOTHING`.

    What no activity ended belongs to the step of the last one before.
    """
    step = np.append(trace.kernels["step"].to_numpy(np.int64, na_value=NOTHING), NOTHING)
    row = trace.idle["kernel_row"].to_numpy(np.int64, na_value=NOTHING)
    return np.asarray(step[row])


def _names(trace: Trace) -> np.ndarray:
    """Return for each row of `idle` the name that explains most of it, by its place in `NAMES`."""
    ranges, idle = trace.ranges, trace.idle
    found = np.full(len(idle), NOTHING, dtype=np.int64)
    names = ranges["name"].cat
    start = ranges["start_ns"].to_numpy(np.int64)
    end = start + ranges["duration_ns"].to_numpy(np.int64)
    begins = idle["start_ns"].to_numpy(np.int64)
    ends = begins + idle["duration_ns"].to_numpy(np.int64)
    evidence = idle["evidence_row"].to_numpy(np.int64, na_value=NOTHING)
    for at, pattern in enumerate(NAMES.values()):
        matches = np.append(np.asarray(names.categories.str.contains(pattern), dtype=bool), False)
        rows = np.flatnonzero(matches[names.codes.to_numpy()])
        if at == list(NAMES).index(LOADING):
            rows = np.union1d(rows, find_host(trace).rows["loaded kernels"])
        if not len(rows):
            continue
        is_mine = np.isin(evidence, rows)
        for rank in np.unique(ranges["rank"].to_numpy()[rows]):
            of = rows[(ranges["rank"].to_numpy() == rank)[rows]]
            union = disjoint(Intervals(start[of], end[of], of))
            mostly = 2 * length_in(union, begins, ends) > ends - begins
            is_mine |= mostly & (idle["rank"] == rank).to_numpy(bool)
        found[is_mine & (found == NOTHING)] = at
    return found


def _listed(trace: Trace, once: Once) -> tuple[StartUp, ...]:
    """Return the start-up in steps by what it was and where, longest first."""
    idle, once_ns = trace.idle, np.minimum(once.ns, idle_in_steps_ns(trace))
    rows = np.flatnonzero(once_ns > 0)
    whole_ns = denominator(trace).time_ns
    known = np.array([*NAMES, None], dtype=object)
    cause = idle["cause"].astype(object).to_numpy()[rows]
    what = np.where(once.name[rows] == NOTHING, cause, known[once.name[rows]])
    place = idle["place"].astype(object).to_numpy()[rows]
    table = pd.DataFrame({"what": what, "place": place, "ns": once_ns[rows]})
    groups = table.groupby(["what", "place"], dropna=False, sort=False)["ns"]
    sums = groups.agg(["sum", "size"]).sort_values("sum", ascending=False, kind="stable")
    return tuple(
        StartUp(
            "idle, cause not known" if pd.isna(key[0]) else str(key[0]),
            None if pd.isna(key[1]) else str(key[1]),
            int(total),
            int(number),
        )
        for key, total, number in zip(sums.index, sums["sum"], sums["size"], strict=True)
        if total >= LEAST_SHARE * whole_ns
    )


def start_up_ns(trace: Trace) -> int:
    """Return how much idle time in steps is start-up, also what is too short to be listed."""
    return int(np.minimum(find_once(trace).ns, idle_in_steps_ns(trace)).sum())


def start_up_by_cause(trace: Trace) -> dict[str | None, int]:
    """Return how much of the idle time in steps is start-up, by cause; None: cause not known."""
    once_ns = pd.Series(np.minimum(find_once(trace).ns, idle_in_steps_ns(trace)))
    sums = once_ns.groupby(trace.idle["cause"].astype(object).to_numpy(), dropna=False).sum()
    return {None if pd.isna(cause) else str(cause): int(ns) for cause, ns in sums.items()}


def idle_in_steps_ns(trace: Trace) -> np.ndarray:
    """Return how much of each row of `idle` lies in steps; all of it where none is marked."""
    return np.asarray(trace.idle["duration_ns"].to_numpy(np.int64) - find_lead(trace).idle_ns)


def count_steps_of_window(trace: Trace) -> int:
    """Return how many steps the rank with most has in the window; 0 where none is marked."""
    rows = step_rows(trace.ranges)
    if not len(rows):
        return 0
    return int(np.unique(trace.ranges["rank"].to_numpy()[rows], return_counts=True)[1].max())
