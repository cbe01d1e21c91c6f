"""The ledger: every nanosecond of device time in one bucket, with the identities that prove it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from kprof.trace import NOT_RECORDED, Trace, once_per_trace

# Counts that need the start times of activities.
NEEDS_STARTS = ("gpu_busy_union_ns", "gpu_span_ns", "same_stream_overlaps")


@dataclass(frozen=True)
class Ledger:
    """The ledger of one trace; sums over its devices, all in nanoseconds or counts."""

    sum_ns: int
    attributed_ns: int
    unattributed_ns: int
    overlapped_ns: int
    busy_ns: int
    idle_ns: int
    window_ns: int
    buckets: dict[str, int]
    """Bucket to device time; the attributed one and every unattributed one."""
    num_activities: int
    num_kernels: int
    num_orphans: int
    num_graph_launches: int | None
    num_graph_activities: int | None
    """Number of activities that graphs launched; None without the host's calls."""
    num_streams: int | None
    num_same_stream_overlaps: int
    num_lost: int | None
    """Launches of kernels and graphs that left no activity; None where no launch was recorded."""

    @property
    def balances(self) -> bool:
        """Whether the three identities hold to the nanosecond."""
        return (
            self.sum_ns == self.attributed_ns + self.unattributed_ns == sum(self.buckets.values())
            and self.busy_ns == self.sum_ns - self.overlapped_ns
            and self.window_ns == self.busy_ns + self.idle_ns
        )


def num_launches(kernels: pd.DataFrame) -> np.ndarray:
    """Return how many launches each row stands for."""
    return kernels["launches"].to_numpy(np.int64, na_value=1)


def union_ns(start_ns: np.ndarray, end_ns: np.ndarray) -> int:
    """Return the length of the union of intervals, in ns."""
    return int(_uncovered_ns(start_ns, end_ns).sum())


@once_per_trace
def balance(trace: Trace) -> Ledger:
    """Balance the ledger of an attributed trace.

    Busy time and the window are taken device by device and summed: idle is time in which no
    activity ran on that device, on any stream. A device's window is that of its rank.
    """
    kernels = trace.kernels
    start_ns, duration_ns = kernels["start_ns"].to_numpy(), kernels["duration_ns"].to_numpy()
    end_ns = start_ns + duration_ns
    rank, device = kernels["rank"].to_numpy(), kernels["device"].to_numpy()
    busy_ns = window_ns = 0
    for one in np.unique(rank):
        mine = rank == one
        of_rank_ns = int(end_ns[mine].max() - start_ns[mine].min())
        for each in np.unique(device[mine]):
            on_it = mine & (device == each)
            busy_ns += union_ns(start_ns[on_it], end_ns[on_it])
            window_ns += of_rank_ns
    buckets = _time_by_bucket(kernels)
    sum_ns = int(duration_ns.sum())
    attributed_ns = buckets.get("attributed", 0)
    is_graph = launched_by_graph(trace)
    launches = count_launches(trace)
    knows_calls = _knows_calls(trace)
    return Ledger(
        sum_ns=sum_ns,
        attributed_ns=attributed_ns,
        unattributed_ns=sum(ns for name, ns in buckets.items() if name != "attributed"),
        overlapped_ns=sum_ns - busy_ns,
        busy_ns=busy_ns,
        idle_ns=window_ns - busy_ns,
        window_ns=window_ns,
        buckets=buckets,
        num_activities=int(num_launches(kernels).sum()),
        num_kernels=int(num_launches(kernels)[(kernels["activity"] == "kernel").to_numpy()].sum()),
        num_orphans=int((kernels["bucket"] == "orphan").sum()),
        num_graph_launches=int(_is_graph_launch(trace.ranges).sum()) if knows_calls else None,
        num_graph_activities=int(is_graph.sum()) if knows_calls else None,
        num_streams=_count_streams(kernels),
        num_same_stream_overlaps=_same_stream_overlaps(kernels, end_ns),
        num_lost=sum(of_rank.num_lost for of_rank in launches) if launches else None,
    )


def truth_columns(trace: Trace, ledger: Ledger) -> dict[str, int | str | None]:
    """Return the counts of the trace and its ledger; None marks unknown ones."""
    counts = trace.meta.counts
    is_graph = launched_by_graph(trace)
    duration_ns = trace.kernels["duration_ns"].to_numpy()
    on_device: dict[str, int | None] = {
        "gpu_sum_ns": ledger.sum_ns,
        "gpu_busy_union_ns": ledger.busy_ns,
        "gpu_span_ns": ledger.window_ns,
        "orphan_gpu_events": ledger.num_orphans,
        "orphan_sum_ns": ledger.buckets.get("orphan", 0),
        "graph_launches": ledger.num_graph_launches,
        "graph_kernels": ledger.num_graph_activities,
        "graph_sum_ns": int(duration_ns[is_graph].sum()) if _knows_calls(trace) else None,
        "streams": ledger.num_streams,
        "same_stream_overlaps": ledger.num_same_stream_overlaps,
    }
    if trace.is_host_only:
        on_device = dict.fromkeys(on_device)
    of_timeline: dict[str, int | str | None] = {
        "busy_ns": ledger.busy_ns,
        "overlapped_ns": ledger.overlapped_ns,
        "idle_ns": ledger.idle_ns,
        "window_ns": ledger.window_ns,
    }
    if not trace.has_timeline:
        of_timeline = dict.fromkeys(of_timeline)
        on_device |= dict.fromkeys(NEEDS_STARTS)
    return {
        "file": trace.meta.source,
        "bytes": counts.get("file_bytes"),
        "raw_json_bytes": counts.get("raw_json_bytes"),
        "activity": "host" if trace.is_host_only else "device",
        "events": counts.get("events"),
        "gpu_events": 0 if trace.is_host_only else ledger.num_activities,
        "kernels": ledger.num_kernels,
        **on_device,
        "launches_without_activity": ledger.num_lost,
        "nn_module_events": counts.get("nn_module_events"),
        "seq_ops": counts.get("seq_ops"),
        "device": trace.gpus[0].name if trace.gpus else None,
        "sum_ns": ledger.sum_ns,
        "attributed_ns": ledger.attributed_ns,
        "unattributed_ns": ledger.unattributed_ns,
        **of_timeline,
    }


def _count_streams(kernels: pd.DataFrame) -> int | None:
    """Count the streams; None where an activity's stream was not recorded."""
    if (kernels["stream"] == NOT_RECORDED).any():
        return None
    return len(kernels[["rank", "device", "stream"]].drop_duplicates())


def _knows_calls(trace: Trace) -> bool:
    """Tell whether calls of the host were recorded on every rank that used a device.

    Without a timeline there are sums alone, of launches by any call.
    """
    is_call = (trace.ranges["kind"] == "runtime").to_numpy(bool)
    ranks = set(trace.kernels["rank"].unique()) - set(trace.ranges["rank"][is_call].unique())
    return trace.has_timeline and not ranks


def is_graph_launch_name(names: pd.Index) -> np.ndarray:
    """Tell which names of runtime calls replay a graph (cudaGraphLaunch, hipGraphLaunch, …)."""
    return np.asarray(names.str.contains("GraphLaunch", regex=False), dtype=bool)


def _is_graph_launch(ranges: pd.DataFrame) -> np.ndarray:
    name = ranges["name"].cat
    if not len(name.categories):
        return np.zeros(len(ranges), dtype=bool)
    codes = name.codes.to_numpy()
    named = is_graph_launch_name(name.categories)[codes] & (codes >= 0)
    return np.asarray(named & (ranges["kind"] == "runtime").to_numpy())


def launched_by_graph(trace: Trace) -> np.ndarray:
    """Tell which device activities a replay of a graph launched."""
    launch = trace.kernels["launch_row"]
    row = launch.fillna(-1).to_numpy(dtype=np.int64)
    if not len(trace.ranges):
        return np.zeros(len(row), dtype=bool)
    return np.asarray(_is_graph_launch(trace.ranges)[row] & (row >= 0))


def _time_by_bucket(kernels: pd.DataFrame) -> dict[str, int]:
    time = kernels.groupby("bucket", observed=True, dropna=False)["duration_ns"].sum()
    return {str(name): int(ns) for name, ns in time.items()}


def _uncovered_ns(start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
    """Return for each interval, in order of start, the part that no earlier one covers."""
    if not len(start_ns):
        return start_ns
    order = np.argsort(start_ns, kind="stable")
    start, end = start_ns[order], end_ns[order]
    covered_to = np.concatenate([start[:1], np.maximum.accumulate(end)[:-1]])
    return np.asarray(np.maximum(end - np.maximum(start, covered_to), 0))


def _same_stream_overlaps(kernels: pd.DataFrame, end_ns: np.ndarray) -> int:
    """Count activities that start before the one before them on their stream has ended."""
    keys = [kernels[c].to_numpy() for c in ("stream", "device", "rank")]
    start = kernels["start_ns"].to_numpy()
    order = np.lexsort([end_ns, start, *keys])
    same = np.ones(max(len(order) - 1, 0), dtype=bool)
    for key in keys:
        same &= key[order][1:] == key[order][:-1]
    return int((same & (start[order][1:] < end_ns[order][:-1])).sum())


# Copies and sets are not counted: of no bytes, or between host buffers, they leave no activity.
LAUNCH = r"Launch(?:Cooperative)?Kernel|KernelLaunch|GraphLaunch"
# While a stream is captured, launches only become nodes of a graph.
CAPTURE_BEGINS = r"StreamBeginCapture"
CAPTURE_ENDS = r"StreamEndCapture"


@dataclass(frozen=True)
class Launches:
    """The launches of kernels and graphs on one rank, and those that left no activity."""

    rank: int
    number: int
    lost_at_start: int
    """Before the first that left an activity; all where none did."""
    lost_in_between: int
    lost_at_end: int
    """After the last that left one: perhaps not finished when the recording stopped."""

    @property
    def num_lost(self) -> int:
        """How many left no activity, wherever they were made."""
        return self.lost_at_start + self.lost_in_between + self.lost_at_end


@once_per_trace
def count_launches(trace: Trace) -> list[Launches]:
    """Count every rank's launches in an attributed trace, and what was lost of them.

    Launches into a graph that is being captured run nothing and are left out. So is a rank of
    which no launch was recorded, or whose activities do not tell which launch they belong to.
    """
    ranges = trace.ranges
    start, rank = ranges["start_ns"].to_numpy(np.int64), ranges["rank"].to_numpy()
    is_launch = _is_call(trace, LAUNCH) & ranges["correlation"].notna().to_numpy()
    begins, ends = _is_call(trace, CAPTURE_BEGINS), _is_call(trace, CAPTURE_ENDS)
    has_activity = np.zeros(len(ranges), dtype=bool)
    has_activity[trace.kernels["launch_row"].dropna().to_numpy(np.int64)] = True
    on_device = trace.kernels["rank"][(trace.kernels["activity"] != "host").to_numpy()]
    untold = set(on_device.unique()) - set(rank[is_launch & has_activity].tolist())
    found = []
    for one in sorted(set(rank[is_launch].tolist()) - untold):
        mine = rank == one
        rows = np.flatnonzero(mine & is_launch)
        rows = rows[np.argsort(start[rows], kind="stable")]
        is_captured = _is_within(start[rows], start[mine & begins], start[mine & ends])
        found.append(_counted(one, has_activity[rows[has_activity[rows] | ~is_captured]]))
    return found


def _counted(rank: int, has_activity: np.ndarray) -> Launches:
    """Count a rank's launches by whether they left an activity, in the order they were made."""
    number = len(has_activity)
    if not has_activity.any():
        return Launches(rank, number, number, 0, 0)
    at_start, at_end = int(has_activity.argmax()), int(has_activity[::-1].argmax())
    num_lost = number - int(has_activity.sum())
    return Launches(rank, number, at_start, num_lost - at_start - at_end, at_end)


def _is_within(moment: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Tell which moments lie in a capture, on any thread.

    One that began before the recording, or ends after it, is known by its other end alone.
    """
    moments = np.sort(begins), np.sort(ends)
    num_begun, num_ended = (np.searchsorted(of, moment, side="right") for of in moments)
    # Captures that were open when the recording began: ends that no begin precedes.
    edges = np.concatenate([begins, ends])
    steps = np.repeat([1, -1], [len(begins), len(ends)])[np.argsort(edges, kind="stable")]
    num_open_before = -min(int(np.cumsum(steps).min(initial=0)), 0)
    return np.asarray(num_open_before + num_begun - num_ended > 0)


def _is_call(trace: Trace, pattern: str) -> np.ndarray:
    """Tell which rows are runtime calls of such a name."""
    name = trace.ranges["name"].cat
    # A row without a name has the code -1, which reads the last.
    matches = np.append(np.asarray(name.categories.str.contains(pattern), dtype=bool), False)
    is_runtime = (trace.ranges["kind"] == "runtime").to_numpy(bool)
    return np.asarray(matches[name.codes.to_numpy()] & is_runtime)
