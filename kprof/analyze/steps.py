"""Steps of a run: when the host entered and left each, and when the device was done with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import pandas as pd

from kprof.analyze.marks import step_rows
from kprof.analyze.overlap import allotted_time
from kprof.analyze.summary import measure_elapsed
from kprof.trace import Trace, once_per_trace

MOST_DIGITS = 18


@dataclass(frozen=True)
class Step:
    """One recorded step: the host's time in it, and when the device's work for it ended."""

    number: int
    rank: int
    start_ns: int
    duration_ns: int
    device_end_ns: int
    """End of the last activity launched in it; the host's end where there was none."""


@once_per_trace
def find_steps(trace: Trace) -> list[Step]:
    """Return the recorded steps of every rank, in the order of their starts."""
    rows = trace.ranges.iloc[step_rows(trace.ranges)]
    numbers = [number_in(str(name)) for name in rows["name"]]
    ends = _device_ends(trace.kernels, rows, numbers)
    steps = []
    columns = rows[["rank", "start_ns", "duration_ns"]].itertuples(index=False)
    for row, number, last_ns in zip(columns, numbers, ends, strict=True):
        end_ns = int(row.start_ns + row.duration_ns)
        device_end_ns = max(last_ns, end_ns)
        steps.append(
            Step(number, int(row.rank), int(row.start_ns), int(row.duration_ns), device_end_ns)
        )
    return steps


@once_per_trace
def count_gpu_steps(trace: Trace) -> int:
    """Return how many steps the GPUs took, a rank's once for each of its GPUs; 0 without marks.

    Over so many the time of all GPUs comes to that of one in a step. A rank without marks took as
    many as the rank with most.
    """
    of_rank = trace.kernels[["rank", "device"]].drop_duplicates()["rank"].value_counts().to_dict()
    ranks = trace.ranges["rank"].to_numpy()[step_rows(trace.ranges)].tolist()
    marked: dict[int, int] = {rank: ranks.count(rank) for rank in set(ranks)}
    most = max(marked.values(), default=0)
    unmarked = sum(int(gpus) for rank, gpus in of_rank.items() if rank not in marked)
    counted = (int(of_rank.get(rank, 1)) * steps for rank, steps in marked.items())
    return sum(counted) + unmarked * most


@dataclass(frozen=True)
class Lead:
    """The part of the window in no step: activities that were launched before the first one.

    A recording may begin while launches from before it still wait in the queue of the device, and
    hold launches of before its first step.
    """

    kernels: np.ndarray
    """Whether each row of `kernels` was launched before the first step."""
    idle: np.ndarray
    """Whether each row of `idle` lies before the device was done with those."""
    time_ns: int
    """How much of the windows of all GPUs that is."""


def find_lead(trace: Trace) -> Lead:
    """Return what was launched before the first step, and the idle time until it had ended."""
    idle = trace.idle
    rows, end_ns = before_launches(trace)
    started = idle["start_ns"].to_numpy(np.int64)
    pieces = np.zeros(len(idle), dtype=bool)
    if not end_ns:
        return Lead(rows, pieces, 0)
    for (rank, device), last_ns in end_ns.items():
        mine = (idle["rank"] == rank) & (idle["device"] == device)
        pieces |= mine.to_numpy(bool) & (started < last_ns)
    inside = pieces & idle["edge"].isna().to_numpy(bool)
    waited_ns = int(idle["duration_ns"].to_numpy(np.int64)[inside].sum())
    return Lead(rows, pieces, int(allotted_time(trace)[rows].sum()) + waited_ns)


def without_lead(trace: Trace) -> Trace:
    """Return the trace in which what was launched before the first step has no kind.

    Rows keep their places. The idle time beside it has no cause and no duration any more.
    """
    lead = find_lead(trace)
    if not lead.time_ns:
        return trace
    idle = trace.idle
    idle = idle.assign(
        duration_ns=idle["duration_ns"].mask(lead.idle, 0),
        recoverable_ns=idle["recoverable_ns"].mask(lead.idle, 0),
        cause=idle["cause"].mask(lead.idle),
    )
    kind = trace.kernels["kind"].mask(lead.kernels)
    return replace(trace.with_kernels(kind=kind), idle=idle)


def before_launches(trace: Trace) -> tuple[np.ndarray, dict[tuple[int, int], int]]:
    """Tell which activities were launched before the first step; by GPU, when the last ended.

    Streams run in order: what has no launch record, and comes before all of its stream that were
    launched in the recording, was launched before it. In ranks without steps there is none.
    """
    kernels = trace.kernels
    rows = np.zeros(len(kernels), dtype=bool)
    if "bucket" not in kernels or "step" not in kernels or not trace.has_timeline:
        return rows, {}
    with_steps = kernels["rank"][kernels["step"].notna()].unique()
    is_orphan = (kernels["bucket"] == "orphan").to_numpy(bool)
    is_orphan = is_orphan & kernels["rank"].isin(with_steps).to_numpy(bool)
    is_early = _launched_early(trace)
    if not (is_orphan.any() or is_early.any()):
        return rows, {}
    start = kernels["start_ns"].to_numpy(np.int64)
    end = start + kernels["duration_ns"].to_numpy(np.int64)
    lane = kernels.groupby(["rank", "device", "stream"], dropna=False).ngroup().to_numpy()
    first = np.full(int(lane.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, lane[~is_orphan], start[~is_orphan])
    has_launches = (first < np.iinfo(np.int64).max)[lane]
    rows = is_early | (is_orphan & has_launches & (start < first[lane]))
    ends: dict[tuple[int, int], int] = {}
    gpus = kernels[["rank", "device"]]
    for rank, device in gpus[rows].drop_duplicates().itertuples(index=False):
        of_gpu = ((gpus["rank"] == rank) & (gpus["device"] == device)).to_numpy(bool)
        last_ns = int(end[rows & of_gpu].max())
        # Of a stream without any launch nothing but the time tells.
        rows |= is_orphan & of_gpu & ~has_launches & (start < last_ns)
        ends[int(rank), int(device)] = int(end[rows & of_gpu].max())
    return rows, ends


def _launched_early(trace: Trace) -> np.ndarray:
    """Tell which activities the host launched before the first step of their rank."""
    kernels, ranges = trace.kernels, trace.ranges
    marks = step_rows(ranges)
    if not len(marks):
        return np.zeros(len(kernels), dtype=bool)
    begins = ranges["start_ns"].to_numpy(np.int64)
    first = pd.Series(begins[marks]).groupby(ranges["rank"].to_numpy()[marks]).min()
    of_none = np.iinfo(np.int64).min
    limit = first.reindex(kernels["rank"].to_numpy(), fill_value=of_none).to_numpy()
    launch = kernels["launch_row"].to_numpy(np.int64, na_value=-1)
    is_known = (launch >= 0) & kernels["step"].isna().to_numpy(bool)
    return np.asarray(is_known & (begins[launch] < limit))


@dataclass(frozen=True)
class StepTimes:
    """How long each step took, in ns, and how that was told."""

    recorded_ns: tuple[int, ...]
    unrecorded_ns: tuple[int, ...]
    """Of steps after the warm-up that were not recorded, on the same clock."""
    clock: str


def time_steps(trace: Trace) -> StepTimes:
    """Return how long the steps of one rank took: by the recorder, else by what they left behind.

    Then a step on a device lasts from the end of the last activity of the one before; the first
    from the host's entry into it, or from the end of what was launched before the first step.
    """
    recording = trace.meta.recording
    on_device = bool((trace.kernels["activity"] != "host").any())
    is_timed = recording is not None and (recording.step_clock == "device" or not on_device)
    if recording is not None and is_timed and recording.recorded_step_ns:
        times = recording.recorded_step_ns, recording.unrecorded_step_ns
        return StepTimes(*times, f"the {recording.step_clock}'s clock")
    steps = find_steps(trace)
    first = min((step.rank for step in steps), default=0)
    steps = [step for step in steps if step.rank == first]
    if not on_device:
        return StepTimes(tuple(step.duration_ns for step in steps), (), "the host's clock")
    # A step without work of its own is done when the one before it is.
    ends_ns = list(accumulate((step.device_end_ns for step in steps), max))
    begins_ns = [*(_begin_ns(trace, step) for step in steps[:1]), *ends_ns[:-1]]
    times_ns = tuple(end - begin for begin, end in zip(begins_ns, ends_ns, strict=True))
    return StepTimes(times_ns, (), "the ends of their activities")


@once_per_trace
def whole_ns(trace: Trace) -> int:
    """Return what all shares of a trace's findings are of, in ns.

    The mean step of the rank in which it is longest; the longest window of a rank where no step is
    marked.
    """
    steps = find_steps(trace)
    if not steps:
        return measure_elapsed(trace.kernels)
    means = []
    for rank in sorted({step.rank for step in steps}):
        mine = [step for step in steps if step.rank == rank]
        if trace.is_host_only:
            means.append(sum(step.duration_ns for step in mine) // len(mine))
        else:
            last_ns = max(step.device_end_ns for step in mine)
            means.append((last_ns - _begin_ns(trace, mine[0])) // len(mine))
    return max(means)


def _begin_ns(trace: Trace, first: Step) -> int:
    """Return when the devices of a rank began with its first step."""
    of_rank = (end for (rank, _), end in before_launches(trace)[1].items() if rank == first.rank)
    return max((first.start_ns, *of_rank))


def median_step(steps: list[Step]) -> Step:
    """Return the step of median duration, the shorter of the middle two."""
    by_duration = sorted(steps, key=lambda step: step.duration_ns)
    return by_duration[(len(steps) - 1) // 2]


def _device_ends(kernels: pd.DataFrame, rows: pd.DataFrame, numbers: list[int]) -> list[int]:
    """Return for every step when the last activity of its number ended; 0 where there is none.

    A number may occur twice, as in two recordings in one file: an activity belongs to the last
    such step that began before it.
    """
    known = kernels["step"].notna().to_numpy(bool)
    start = kernels["start_ns"].to_numpy(np.int64)[known]
    mine = pd.DataFrame(
        {
            "rank": kernels["rank"].to_numpy()[known],
            "number": kernels["step"][known].to_numpy(np.int64),
            "start": start,
            "end": start + kernels["duration_ns"].to_numpy(np.int64)[known],
        }
    )
    steps = pd.DataFrame(
        {
            "rank": rows["rank"].to_numpy(),
            "number": np.array(numbers, dtype=np.int64),
            "start": rows["start_ns"].to_numpy(np.int64),
            "step": np.arange(len(rows)),
        }
    )
    keys = ["rank", "number"]
    steps["turn"] = steps.groupby(keys).cumcount()
    if not steps["turn"].any():
        found = mine.merge(steps[[*keys, "step"]], on=keys)
    else:
        found = pd.merge_asof(
            mine.sort_values("start"), steps.sort_values("start"), on="start", by=keys
        ).dropna(subset=["step"])
    latest = found.groupby("step")["end"].max()
    return [int(end) for end in latest.reindex(range(len(rows)), fill_value=0)]


def number_in(name: str) -> int:
    """Return the number of a step from its range's name; -1 where the name has none."""
    name = name.rpartition("#")[2]
    # Other scripts' digits are digits too, and a number may be longer than an int64.
    return int(name) if name.isascii() and name.isdecimal() and len(name) <= MOST_DIGITS else -1
