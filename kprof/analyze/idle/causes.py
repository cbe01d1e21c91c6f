"""The causes of idle time: their names, the calls that show them, their sums."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kprof.analyze.groupings import collapse_layers, longest_first, number_groups, number_rows
from kprof.analyze.intervals import Intervals, disjoint, length_in
from kprof.trace import Trace, once_per_table, once_per_tables

LAUNCH_BOUND = "launch-bound"
DATA_LOADING = "data loading"
SYNCHRONIZATION = "synchronization"
PAGEABLE_COPY = "pageable copy"
ALLOCATOR = "allocator"
COLLECTIVE_WAIT = "collective wait"
DEPENDENCY_WAIT = "dependency wait"
BETWEEN_KERNELS = "between kernels"
PROFILER = "profiler"
NO_WORK = "no work"

CAUSES = (
    LAUNCH_BOUND,
    DATA_LOADING,
    SYNCHRONIZATION,
    PAGEABLE_COPY,
    ALLOCATOR,
    COLLECTIVE_WAIT,
    DEPENDENCY_WAIT,
    BETWEEN_KERNELS,
    PROFILER,
    NO_WORK,
)

# Idle time that goes away with its cause. How much of a wait for another stream would remain is
# unknown; the device's own delay between kernels and time without requests remain; the profiler's
# time is absent without it.
RECOVERABLE = frozenset(
    {LAUNCH_BOUND, DATA_LOADING, SYNCHRONIZATION, PAGEABLE_COPY, ALLOCATOR, COLLECTIVE_WAIT}
)
NOT_RECOVERABLE = frozenset({BETWEEN_KERNELS, PROFILER, NO_WORK})
# The device's and the recorder's own: no start-up of the workload.
BESIDES = (BETWEEN_KERNELS, PROFILER)

# Calls of the CUDA and HIP runtimes and drivers; Nsight Systems adds a version to their names.
SYNCHRONIZING_CALL = (
    r"Synchronize|^(?:cuda|hip)Memcpy(?:2D|3D|Peer|ToSymbol|FromSymbol|WithStream)?(?:_v\d+|_ptds)*$"
    r"|^cuMemcpy(?!.*Async)"
)
ALLOCATING_CALL = (
    r"^(?:cuda|hip)(?!.*Async)(?:Malloc|Free|Host(?:Alloc|Malloc|Free|Register|Unregister))"
    r"|^cuMem(?!.*Async)(?:Create|Release|Map|Unmap|SetAccess|Alloc|Free|Address|Host)"
)
# Of them those of pinned memory of the host.
PINNING_CALL = (
    r"^(?:cuda|hip)(?:MallocHost|FreeHost|Host(?:Alloc|Malloc|Free|Register|Unregister))"
    r"|^cuMem(?:AllocHost|FreeHost|Host)"
)
# Copies from memory that is not pinned: the host itself moves the bytes to where the device gets
# them. (Copies the other way are how the host fetches a result, and count as synchronization.)
PAGEABLE_UPLOAD = r"HtoD \(Pageable"
PAGEABLE_DOWNLOAD = r"DtoH \(.*Pageable\)"
# Pages of unified memory, which the driver moves as one side touches them; nothing launches that.
MIGRATION = r"^Memcpy UVM (?:HtoD|DtoH)"
# Operators in which the host itself waits for the other ranks.
BLOCKING_COLLECTIVE = r"barrier"
LOADING_RANGE = r"^enumerate\(Data(?:Loader|Pipe)\)#"
LOADING_FUNCTION = r"^torch/utils/data/dataloader\.py\(\d+\): __next__"
# Python's own ways to wait, as its profiler names them.
WAITING_FUNCTION = (
    r"^<built-in (?:function|method) (?:sleep|acquire|select|poll|wait|recv|recv_into|recv_bytes"
    r"|accept|sigwait|sigtimedwait|waitpid)\b(?! of torch)"
)
# The system's, as Nsight Systems names them.
WAITING_CALL = (
    r"^(?:u|nano|clock_nano)?sleep$|^p?poll$|^p?select$|^epoll_p?wait|^accept4?$|^recv"
    r"|^sem_(?:timed|clock)?wait|^pthread_cond_|^pthread_mutex_(?:timed|clock)?lock$|^futex$"
    r"|^sig(?:timed)?wait|^wait(?:pid|id|3|4)?$"
)
# CUPTI's reports of its own work: the driver loads a kernel when it is first launched.
LOADING_OF_KERNELS = r"^Lazy "
# Where it does not report that: a kernel's first launch takes so many times as long as others.
LAUNCHING_CALL = r"^(?:cuda|cu|hip)(?:Module)?Launch(?:Cooperative)?Kernel"
LOADING_TIMES_A_LAUNCH = 10
DRIVERS_OWN = r"^(?:Lazy |Command Buffer Full)"

Int64s = NDArray[np.int64]

# Those in which every rank waits for all: no broadcast, no send, no all-to-all with empty parts.
SYMMETRIC = re.compile(r"_?(?:all_?reduce|all_?gather|reduce_?scatter|barrier)")


def inside_window(idle: pd.DataFrame) -> pd.DataFrame:
    """Return the pieces between the first and the last activity of each rank."""
    inside: pd.DataFrame = idle[idle["edge"].isna().to_numpy(bool)]
    return inside


@once_per_table
def group_idle(idle: pd.DataFrame) -> pd.DataFrame:
    """Add up pieces by cause, longest first; those of unknown cause form a group.

    Columns: `cause`, `time_ns`, `share` (of the time in `idle`), `recoverable_ns` (missing where
    it is unknown), `pieces` (their number), `longest_ns`. The recoverable times of two causes never
    overlap: they may be added.
    """
    groups = _by(idle, ["cause"])
    groups["share"] = groups["time_ns"] / max(int(groups["time_ns"].sum()), 1)
    columns = ["cause", "time_ns", "share", "recoverable_ns", "pieces", "longest_ns"]
    ordered: pd.DataFrame = groups[columns]
    return ordered


def worst_places(idle: pd.DataFrame, number: int) -> pd.DataFrame:
    """Return for each cause the `number` places that cost most, as `group_idle` adds up.

    Layers of one kind count as one place. The device's own time between kernels has none.
    """
    by_cause = _group_places(idle).groupby("cause", observed=True, dropna=False)
    worst: pd.DataFrame = by_cause.head(number).reset_index(drop=True)
    return worst


@once_per_table
def _group_places(idle: pd.DataFrame) -> pd.DataFrame:
    placed = idle[(idle["place"].notna() | idle["line"].notna()).to_numpy(bool)]
    layers = {name: collapse_layers(placed[name]) for name in ("place", "module")}
    return _by(placed.assign(**layers), ["cause", "place", "module", "line"])


def _by(idle: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    number, named = number_groups(idle, keys)
    groups = idle[["duration_ns", "recoverable_ns"]].groupby(number, sort=False)
    sums = pd.DataFrame(
        {
            "time_ns": groups["duration_ns"].sum(),
            "recoverable_ns": groups["recoverable_ns"].sum(min_count=1),
            "pieces": groups["duration_ns"].size(),
            "longest_ns": groups["duration_ns"].max(),
        }
    )
    return longest_first(pd.concat([named, sums], axis=1), keys)


@dataclass(frozen=True)
class ExposedWait:
    """Time in which a rank's collectives ran, but only waited for a rank that came later."""

    rank: int
    waiting_ns: int
    exposed_ns: int
    """The part of it in which nothing else ran on the device."""
    num_collectives: int


def find_exposed_waits(trace: Trace) -> list[ExposedWait] | None:
    """Find how long collectives of each rank waited for the last rank to begin the same one.

    This time counts as busy, not as idle. None where `collective_waits` knows none.
    """
    waits = collective_waits(trace)
    if waits is None:
        return None
    ranks = waits["rank"].to_numpy(np.int64)
    waiting, exposed = (waits[c].to_numpy(np.int64) for c in ("waiting_ns", "exposed_ns"))
    return [
        ExposedWait(int(one), int(waiting[mine].sum()), int(exposed[mine].sum()), int(mine.sum()))
        for one in np.unique(ranks)
        for mine in [ranks == one]
    ]


@once_per_tables("kernels")
def collective_waits(trace: Trace) -> pd.DataFrame | None:
    """Return the collectives that several ranks took part in, and how long each waited in them.

    A collective ends on all ranks together, so one that takes longer than the shortest of them
    waited for the rest of its time, on any offset of the ranks' clocks. `exposed_ns` is the part in
    which nothing else ran on the device. None where one rank was recorded, or no numbers tell
    which collectives belong together. Columns: `row` in `kernels`, `rank`, `group`, `number`,
    `collective`, `step`, `start_ns`, `waiting_ns`, `exposed_ns`. Read only.
    """
    kernels = trace.kernels
    names = kernels["collective"].cat
    is_symmetric = np.array([*(bool(SYMMETRIC.match(str(n))) for n in names.categories), False])
    chosen = is_symmetric[names.codes.to_numpy()]
    chosen &= (kernels["group_sequence"].notna() & kernels["group"].notna()).to_numpy(bool)
    rows = np.flatnonzero(chosen)
    calls = kernels.iloc[rows]
    keys = [calls[name] for name in ("group", "group_sequence", "collective")]
    together = calls.groupby(keys, observed=True, sort=False)
    is_shared = (together["rank"].transform("nunique") > 1).to_numpy(bool)
    if not is_shared.any():
        return None
    shortest = together["duration_ns"].transform("min").to_numpy(np.int64)[is_shared]
    rows, calls = rows[is_shared], calls[is_shared]
    start = calls["start_ns"].to_numpy(np.int64)
    waiting = calls["duration_ns"].to_numpy(np.int64) - shortest
    step = calls["step"] if "step" in calls else pd.array([pd.NA] * len(rows), "Int64")
    waits: pd.DataFrame = pd.DataFrame(
        {
            "row": rows,
            "rank": calls["rank"].to_numpy(np.int64),
            "group": calls["group"].to_numpy(),
            "number": calls["group_sequence"].to_numpy(np.int64),
            "collective": calls["collective"].to_numpy(),
            "step": np.asarray(step),
            "start_ns": start,
            "waiting_ns": waiting,
            "exposed_ns": waiting - _hidden(kernels, rows, start, start + waiting),
        }
    ).astype({"group": "category", "step": "Int64"})
    return waits


def _hidden(kernels: pd.DataFrame, rows: Int64s, start: Int64s, end: Int64s) -> Int64s:
    """Return for how long each of some spans others than collectives ran on its device."""
    is_other = ((kernels["kind"] != "collective") & kernels["collective"].isna()).to_numpy(bool)
    device = number_rows(kernels, ["rank", "device"])
    begins = kernels["start_ns"].to_numpy(np.int64)
    ends = begins + kernels["duration_ns"].to_numpy(np.int64)
    hidden = np.zeros(len(rows), dtype=np.int64)
    for one in np.unique(device[rows]):
        others = np.flatnonzero((device == one) & is_other)
        busy = disjoint(Intervals(begins[others], ends[others], others))
        mine = np.flatnonzero(device[rows] == one)
        hidden[mine] = length_in(busy, start[mine], end[mine])
    return hidden
