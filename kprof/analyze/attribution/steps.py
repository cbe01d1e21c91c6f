"""The steps of a run: the marks that delimit them, the times that they took.

A mark is a range of the kind `step`. Everything that counts or times steps uses these steps.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import pandas as pd

from kprof.analyze.attribution.call_tree import NO_ROW, is_evaluation, is_node, parents
from kprof.analyze.attribution.ledger import union_ns
from kprof.analyze.attribution.overlap import allotted_time, rows_by
from kprof.analyze.groupings import count_gpus, gpus_used, number_rows, split_window
from kprof.analyze.intervals import Intervals, disjoint
from kprof.trace import Trace, once_per_table, once_per_tables, once_per_trace, pairs_in

# By how much the steps of a GPU are shorter than those of the job, which waits for a slower one.
IMBALANCE = "load imbalance"
COLLECTIVE = "collective"


# As torch's profiler calls a step of its schedule; kprof's own have a number alone.
OF_TORCH = "ProfilerStep#"
# The host's ranges may cross by some ns, and by one of the whole microseconds of an old file.
CROSSING_NS = 1_000
OF_OPTIMIZER = "Optimizer.step#"
# Ranges that PyTorch and libraries write, which are parts of a step.
_OF_LIBRARIES = re.compile(
    r"Optimizer\.|enumerate\(Data(?:Loader|Pipe)\)|DistributedDataParallel|FullyShardedDataParallel|FSDP"
    r"|nccl|gloo|mpi|ucc|c10d|torch\.|torchvision|Torch-Compiled|## |CUDAGraph|TorchDynamo"
    r"|Inductor|PyTorch Profiler|record_param_comms|cub::|thrust|cublas|cudnn|cufft|autograd::",
    re.IGNORECASE,
)


def _numbered(*words: str) -> re.Pattern[str]:
    """Match one of the words before a number, for which `*` stands; not inside another word."""
    anywhere, titled = "|".join(words), "|".join(word.capitalize() for word in words)
    return re.compile(rf"(?:(?<![a-zA-Z])(?i:{anywhere})|(?:{titled}))[sS]?[\s_.:=#/\[(-]*\*")


# Ranges that number the parts of a model: each part runs once in a step.
_OF_A_MODEL = _numbered("layer", "block", "stage", "head", "expert", "encoder", "decoder", "module")
# Ranges that number steps, which may also name a stage.
_OF_A_STEP = _numbered("step", "iter", "iteration", "epoch", "batch")
# Ranges of the program; Python's functions are also the profiler's own.
_OF_HOST = ("op", "runtime", "module", "range", "phase")
# A first interval with fewer of the launches of the others began before the recording.
_WHOLE = 0.9
# A larger share of the launches of steps between them is a part of each step.
_MOST_BETWEEN = 0.01
# Ranges outside of which more than this share of launches was made are no steps.
_MOST_OUTSIDE = 0.5


@dataclass(frozen=True)
class Communication:
    """Time of the steps in which collectives ran, each instant of a device once, in ns.

    Of the window where no step is marked.
    """

    total_ns: int
    hidden_ns: int | None
    """The part beside computation; None where the recording has no timeline."""
    exposed_ns: int | None
    """The rest: the time of the kind `collective` in the split of the steps."""


@dataclass(frozen=True)
class Marks:
    """The marks of a trace, sorted out."""

    steps: np.ndarray
    """Rows of `ranges` that are steps, in the order of their starts; of a rank none overlap."""
    of_torch: np.ndarray
    """Rows that torch's profiler marked in ranks that kprof marked, too: no steps."""
    doubtful: np.ndarray
    """Rows left out because they overlap with the steps, though nothing else sets them apart."""


@once_per_table
def sort_out(ranges: pd.DataFrame) -> Marks:
    """Decide which marks are steps.

    More than one may be open at a time: torch's profiler marks the steps of its schedule even while
    it only waits, beside kprof's own; two threads may mark the same steps; a mark may lie around
    others.

    Of each rank kprof's own, where there are any. Of marks around one another the one around
    several is no step, but a part of the run; one in a single other marks the same step again.
    Of threads whose marks overlap the one with most counts. Torch's profiler opens a step when the
    one before ends, and closes it when it stops: a last one in which nothing begins is no step.
    """
    marks = np.flatnonzero((ranges["kind"] == "step").to_numpy(bool))
    marks = np.setdiff1d(marks, _unused(ranges, marks))
    rank, thread, start = (
        ranges[c].to_numpy(np.int64)[marks] for c in ("rank", "thread", "start_ns")
    )
    end = start + ranges["duration_ns"].to_numpy(np.int64)[marks]
    is_torchs = _names_of_torch(ranges, marks)
    steps, of_torch = np.zeros((2, len(marks)), dtype=bool)
    for one in np.unique(rank):
        mine = rank == one
        if not is_torchs[mine].all():
            of_torch |= mine & is_torchs
            mine &= ~is_torchs
        steps[_of_rank(np.flatnonzero(mine), thread, start, end)] = True
    chosen = marks[steps][np.argsort(start[steps], kind="stable")]
    return Marks(chosen, marks[of_torch], marks[~steps & ~of_torch])


def _unused(ranges: pd.DataFrame, marks: np.ndarray) -> list[int]:
    """Return torch's last mark of each rank, where the host does nothing in it but in another."""
    rank, start = (ranges[column].to_numpy(np.int64) for column in ("rank", "start_ns"))
    found = []
    for one in np.unique(rank[marks]):
        mine = marks[rank[marks] == one]
        mine = mine[np.argsort(start[mine], kind="stable")]
        if len(mine) < 2 or not _names_of_torch(ranges, mine).all():
            continue
        last = int(mine[-1])
        begins = start[(rank == one) & ranges["kind"].isin(_OF_HOST).to_numpy(bool)]
        end_ns = start[last] + int(ranges["duration_ns"].iloc[last])
        if ((begins < start[last]) & (begins >= start[mine[0]])).any() and not (
            (begins >= start[last]) & (begins < end_ns)
        ).any():
            found.append(last)
    return found


def step_rows(ranges: pd.DataFrame) -> np.ndarray:
    """Return the rows of `ranges` that are the run's steps, in the order of their starts."""
    return sort_out(ranges).steps


def rule_of(ranges: pd.DataFrame) -> str:
    """Return which rule delimits the steps of a trace that kprof did not record, for the report."""
    names = [str(name) for name in ranges["name"].iloc[step_rows(ranges)].unique()]
    origins = dict.fromkeys(name.rpartition("#")[0] for name in names)
    told = []
    for origin in origins:
        if not origin or origin + "#" == OF_TORCH:
            told.append("marked in the trace" + (f" by {OF_TORCH}" if origin else ""))
        elif origin.startswith(OF_OPTIMIZER):
            told.append(f"from the end of one {origin} to the end of the next")
        else:
            told.append(f"by the range {origin}, which repeats at the top level of its thread")
    return ", ".join(told)


def add_marks(trace: Trace, launch: np.ndarray) -> Trace:
    """Add the marks that other ranges imply to ranks without any; `launch`: of each activity."""
    ranges = trace.ranges
    if trace.meta.recording is not None or not trace.has_timeline or not len(ranges):
        return trace
    marked = set(ranges["rank"][(ranges["kind"] == "step").to_numpy(bool)].unique())
    found = [
        marks
        for rank in sorted(set(ranges["rank"].unique()) - marked)
        if (marks := _implied(trace, int(rank), launch)) is not None
    ]
    if not found:
        return trace
    added = pd.concat(found, ignore_index=True)
    rows: pd.DataFrame = ranges.reindex(range(len(ranges) + len(added)))
    for column in ("rank", "thread", "start_ns", "duration_ns"):
        joined = np.concatenate([ranges[column].to_numpy(), added[column].to_numpy()])
        rows[column] = joined.astype(ranges[column].dtype)
    for column in ("kind", "name"):
        more = added[column].astype(ranges[column].cat.categories.dtype).astype("category")
        rows[column] = pd.api.types.union_categoricals([ranges[column], more])
    return replace(trace, ranges=rows)


def _implied(trace: Trace, rank: int, launch: np.ndarray) -> pd.DataFrame | None:
    """Return the steps of one rank as rows of `ranges`, by the first rule that tells any.

    In a rank of a trace that kprof did not record and that holds no mark, other ranges imply them:
    `Optimizer.step#` from end to end, else ranges that repeat at the top level of the main thread.
    """
    ranges = trace.ranges
    mine = np.flatnonzero((ranges["rank"] == rank).to_numpy(bool))
    texts = [str(name) for name in ranges["name"].cat.categories]
    code = ranges["name"].cat.codes.to_numpy()
    start = ranges["start_ns"].to_numpy(np.int64)
    end = start + ranges["duration_ns"].to_numpy(np.int64)
    is_range = (ranges["kind"] == "range").to_numpy(bool)[mine]
    launched = np.unique(launch[(launch >= 0) & (trace.kernels["rank"] == rank).to_numpy(bool)])
    times = np.sort(start[launched])
    is_optimizer = np.array([text.startswith(OF_OPTIMIZER) for text in texts] + [False])
    is_of_library = np.array([_OF_LIBRARIES.match(text) is not None for text in texts] + [True])
    updates = _of_one_optimizer(trace, mine[is_optimizer[code[mine]] & is_range], launch)
    if len(updates) > 1:
        ends = end[updates]
        begins = np.append(start[mine].min(), ends[:-1])
        inside = np.searchsorted(times, ends) - np.searchsorted(times, begins)
        first = int(inside[0] < _WHOLE * np.median(inside[1:]))
        thread = int(ranges["thread"].iloc[updates[0]])
        return _rows(texts[code[updates[0]]], rank, thread, begins[first:], ends[first:])
    rows = mine[is_range & ~is_of_library[code[mine]]]
    repeated, name = _repeated(ranges, rows, launched)
    if len(repeated) < 2:
        return None
    begins, ends = start[repeated], end[repeated]
    inside = np.searchsorted(times, ends) - np.searchsorted(times, begins)
    if inside.sum() < (1 - _MOST_OUTSIDE) * len(times):
        return None
    return _rows(name, rank, int(ranges["thread"].iloc[repeated[0]]), begins, ends)


def _rows(name: str, rank: int, thread: int, begins: np.ndarray, ends: np.ndarray) -> pd.DataFrame:
    rows: pd.DataFrame = pd.DataFrame(
        {
            "kind": "step",
            "name": [f"{name}#{number}" for number in range(len(begins))],
            "rank": rank,
            "thread": thread,
            "start_ns": begins,
            "duration_ns": ends - begins,
        }
    )
    return rows


def _of_one_optimizer(trace: Trace, rows: np.ndarray, launch: np.ndarray) -> np.ndarray:
    """Return the updates, in order, of the optimizer that has most to update.

    Optimizers of one class have the same name. They are told apart by what they launch, where
    that repeats in turn (G, D, G, D, …), as the first updates, which make the state, do not.
    """
    if len(rows) < 2:
        return rows
    ranges, kernels = trace.ranges, trace.kernels
    start = ranges["start_ns"].to_numpy(np.int64)
    end = start + ranges["duration_ns"].to_numpy(np.int64)
    rows = rows[np.lexsort([-end[rows], start[rows]])]
    # An optimizer that wraps another one updates once.
    reached = np.append(np.iinfo(np.int64).min, np.maximum.accumulate(end[rows])[:-1])[: len(rows)]
    rows = rows[start[rows] >= reached]
    by = np.argsort(start[launch], kind="stable")
    by = by[(launch[by] >= 0) & np.isin(kernels["rank"].to_numpy()[by], ranges["rank"].iloc[rows])]
    time = start[launch[by]]
    names = ranges["name"].cat.codes.to_numpy()
    kernel = kernels[["name", "grid"]].iloc[by].apply(lambda column: column.cat.codes).to_numpy()
    took = kernels["duration_ns"].to_numpy(np.int64)
    what: list[object] = []
    size = np.zeros(len(rows))
    for place, row in enumerate(rows.tolist()):
        inside = slice(np.searchsorted(time, start[row]), np.searchsorted(time, end[row]))
        what.append((names[row], kernel[inside].tobytes()))
        size[place] = took[by[inside]].sum()
    codes = pd.factorize(pd.Series(what, dtype=object))[0]
    for skipped in range(len(rows) // 2):
        period = find_period(codes[skipped:])
        if period is not None:
            turn = (np.arange(len(rows)) - skipped) % period
            member = codes[skipped : skipped + period][turn]
            break
    else:
        member = names[rows]
    # A first update counts with those in the same turn of the cycle.
    kinds = sorted(set(member.tolist()), key=lambda one: -float(np.median(size[member == one])))
    return np.asarray(rows[member == kinds[0]])


def _repeated(
    ranges: pd.DataFrame, rows: np.ndarray, launched: np.ndarray
) -> tuple[np.ndarray, str]:
    """Return the ranges that repeat at the top level of the main thread, and their common name.

    Numbers in names count as one name. Ranges around that occur once are no level. Where several
    names repeat, the one with most time, if it has half of it: else each is a part of a step.
    The numbered layers of a model are parts of a step, and so is all within them.
    """
    thread = ranges["thread"].to_numpy(np.int64)
    # Autograd's thread launches most of a training run, and is never the main one.
    autograd = np.unique(thread[is_node(ranges) | is_evaluation(ranges)])
    votes = thread[launched]
    own = votes[~np.isin(votes, autograd)]
    votes = own if len(own) else votes
    if not len(votes) or not len(rows):
        return np.empty(0, dtype=np.int64), ""
    values, counts = np.unique(votes, return_counts=True)
    rows = rows[thread[rows] == values[counts.argmax()]]
    names = ranges["name"].iloc[rows].astype(str).tolist()
    general = np.array([re.sub(r"\d+", "*", name) for name in names], dtype=object)
    repeats = pd.Series(general).duplicated(keep=False).to_numpy(bool)
    rows, general = rows[repeats], general[repeats]
    if not len(rows):
        return rows, ""
    is_top = parents(ranges, rows)[rows] < 0
    rows, general = rows[is_top], general[is_top]
    time = ranges["duration_ns"].iloc[rows].groupby(general).sum()
    name = str(time.idxmax())
    numbers_layers = _OF_A_MODEL.search(name) is not None and _OF_A_STEP.search(name) is None
    if numbers_layers or time.max() < _MOST_OUTSIDE * time.sum():
        return rows[:0], ""
    chosen = rows[general == name]
    return chosen[np.argsort(ranges["start_ns"].to_numpy()[chosen], kind="stable")], name


def _names_of_torch(ranges: pd.DataFrame, marks: np.ndarray) -> np.ndarray:
    names = ranges["name"].iloc[marks].astype(str)
    return names.str.startswith(OF_TORCH).to_numpy(bool)


def _of_rank(
    marks: np.ndarray, thread: np.ndarray, start: np.ndarray, end: np.ndarray
) -> np.ndarray:
    """Return the steps among the marks of a rank: of all its threads, or of the one with most."""
    together = _one_after_another(marks, start, end)
    parts = [
        _one_after_another(marks[thread[marks] == one], start, end)
        for one in np.unique(thread[marks])
    ]
    if len(together) == sum(map(len, parts)):
        return together
    return max(parts, key=lambda part: (len(part), -int(start[part[0]])))


def _one_after_another(marks: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return marks that do not overlap: what ends first comes first, inner ones before outer."""
    chosen: list[int] = []
    for mark in marks[np.lexsort([-start[marks], end[marks]])].tolist():
        before = len(chosen)
        while before and start[chosen[before - 1]] >= start[mark]:
            before -= 1
        is_around_several = len(chosen) - before > 1
        crosses = before > 0 and end[chosen[before - 1]] > start[mark] + CROSSING_NS
        if not is_around_several and not crosses:
            chosen[before:] = [mark]
    return np.array(chosen, dtype=np.int64)


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


@once_per_tables("kernels", "ranges")
def count_gpu_steps(trace: Trace) -> int:
    """Return how many steps the GPUs took, a rank's once for each of its GPUs; 0 without marks.

    Over so many the time of all GPUs comes to that of one in a step.
    """
    steps = _steps_of_ranks(trace)
    gpus = gpus_used(trace.kernels)
    return sum(steps[rank] for rank, _ in gpus) if gpus else sum(steps.values())


def count_steps_or_gpus(trace: Trace) -> int:
    """Return `count_gpu_steps`, or how many GPUs there are where no step is marked.

    Without a timeline the whole is all device time, and there is one of it.
    """
    if not trace.has_timeline:
        return 1
    return count_gpu_steps(trace) or max(count_gpus(trace.kernels), 1)


def _steps_of_ranks(trace: Trace) -> dict[int, int]:
    """Return how many steps each rank took: one without marks as many as the rank with most."""
    marked = Counter(trace.ranges["rank"].to_numpy()[step_rows(trace.ranges)].tolist())
    most = max(marked.values(), default=0)
    ranks = {*marked, *trace.kernels["rank"].unique().tolist()}
    return {int(rank): int(marked.get(rank, most)) for rank in ranks}


@dataclass(frozen=True)
class Lead:
    """The part of the recording in no step, before the first one or after the last.

    A recording may begin while launches from before it still wait in the queue of the device, and
    hold launches of before its first step, as of another step that is not whole. It may go on after
    the last one, with a final copy or with a part of the next step.
    """

    kernels: np.ndarray
    """Whether each row of `kernels` was launched in no step; in host mode, began in none."""
    idle_ns: np.ndarray
    """How much of each row of `idle` lies before the device began with the first step, or after it
    ended with the last."""
    of_gpus: dict[tuple[int, int], int]
    """How much time of each GPU, by rank and device, that is; none of a GPU is left out."""

    @property
    def time_ns(self) -> int:
        """How much time of all GPUs that is."""
        return sum(self.of_gpus.values())


@once_per_trace
def find_lead(trace: Trace) -> Lead:
    """Return what was launched before the first step or after the last, and the idle time there.

    `of_gpus` follows from `kernels` and `ranges` alone: it stays as it is where a pass shortens
    the rows of `idle`.
    """
    if trace.is_host_only:
        return _outside_on_the_host(trace)
    kernels, idle = trace.kernels, trace.idle
    ends_ns, is_after = before_launches(trace)[1], after_launches(trace)
    rows = outside_steps(trace)
    outside_ns = np.zeros(len(idle), dtype=np.int64)
    if not rows.any():
        return Lead(rows, outside_ns, {})
    spans = _spans(trace)
    idle_start = idle["start_ns"].to_numpy(np.int64)
    idle_took = idle["duration_ns"].to_numpy(np.int64)
    start = kernels["start_ns"].to_numpy(np.int64)
    end = start + kernels["duration_ns"].to_numpy(np.int64)
    allotted, of_gpus = np.where(rows, allotted_time(trace), 0), {}
    for mine in rows_by(kernels, "rank", "device"):
        rank, device = (int(kernels[column].iloc[mine[0]]) for column in ("rank", "device"))
        span = spans[rank]
        begins_ns, last_ns = span.begin_ns, span.end_ns
        if rank in {of for of, _ in ends_ns}:
            begins_ns = max(span.first_ns, ends_ns.get((rank, device), begins_ns))
        if is_after[kernels["rank"].to_numpy() == rank].any():
            last_ns = int(end[mine][~is_after[mine]].max(initial=span.last_ns))
        if (begins_ns, last_ns) == (span.begin_ns, span.end_ns) and not rows[mine].any():
            continue
        here = ((idle["rank"] == rank) & (idle["device"] == device)).to_numpy(bool)
        begun_ns, ended_ns = idle_start[here], idle_start[here] + idle_took[here]
        inside_ns = ended_ns.clip(begins_ns, last_ns) - begun_ns.clip(begins_ns, last_ns)
        outside_ns[here] = idle_took[here] - inside_ns
        waited_ns = 0
        for since, until in ((span.begin_ns, begins_ns), (last_ns, span.end_ns)):
            ran_ns = union_ns(start[mine].clip(since, until), end[mine].clip(since, until))
            waited_ns += until - since - ran_ns
        of_gpus[rank, device] = int(allotted[mine].sum()) + waited_ns
    return Lead(rows, outside_ns, of_gpus)


def measure_communication(trace: Trace) -> Communication:
    """Measure the device time in which collectives of the steps ran, hidden or exposed."""
    kernels = trace.kernels
    is_collective = (kernels["kind"] == COLLECTIVE).to_numpy(bool) & ~find_lead(trace).kernels
    if not trace.has_timeline:
        total_ns = int(kernels["duration_ns"].to_numpy(np.int64)[is_collective].sum())
        return Communication(total_ns, None, None)
    start = kernels["start_ns"].to_numpy(np.int64)
    end = start + kernels["duration_ns"].to_numpy(np.int64)
    total_ns = 0
    for rows in rows_by(kernels, "rank", "device"):
        mine = rows[is_collective[rows]]
        union = disjoint(Intervals(start[mine], end[mine], mine))
        total_ns += int((union.end - union.start).sum())
    exposed_ns = int(allotted_time(trace)[is_collective].sum())
    return Communication(total_ns, total_ns - exposed_ns, exposed_ns)


def _outside_on_the_host(trace: Trace) -> Lead:
    """Return the operators that began before the first step or after the last, and idle time."""
    kernels, idle = trace.kernels, trace.idle
    start = kernels["start_ns"].to_numpy(np.int64)
    end = start + kernels["duration_ns"].to_numpy(np.int64)
    is_outside = np.zeros(len(kernels), dtype=bool)
    idle_start = idle["start_ns"].to_numpy(np.int64)
    idle_end = idle_start + idle["duration_ns"].to_numpy(np.int64)
    outside_ns = np.zeros(len(idle), dtype=np.int64)
    spans = _spans(trace)
    of_gpus: dict[tuple[int, int], int] = {}
    for rows in rows_by(kernels, "rank", "device"):
        rank, device = (int(kernels[column].iloc[rows[0]]) for column in ("rank", "device"))
        span = spans[rank]
        if (span.first_ns, span.last_ns) == (span.begin_ns, span.end_ns):
            continue
        is_outside[rows] = (start[rows] < span.first_ns) | (start[rows] >= span.last_ns)
        begin_ns, end_ns = (
            span.first_ns,
            int(end[rows[~is_outside[rows]]].max(initial=span.last_ns)),
        )
        here = ((idle["rank"] == rank) & (idle["device"] == device)).to_numpy(bool)
        within = idle_end[here].clip(begin_ns, end_ns) - idle_start[here].clip(begin_ns, end_ns)
        outside_ns[here] = idle_end[here] - idle_start[here] - within
        of_gpus[rank, device] = span.end_ns - span.begin_ns - (end_ns - begin_ns)
    return Lead(is_outside, outside_ns, of_gpus)


class _Span(NamedTuple):
    """From when to when the steps and the activities of a rank lasted."""

    begin_ns: int
    end_ns: int
    first_ns: int
    """When the host entered the first step; the begin where no step is marked."""
    last_ns: int
    """When the host left the last step; the end where no step is marked."""


def _spans(trace: Trace) -> dict[int, _Span]:
    """Return the span of every rank: its window, widened to the host's steps."""
    kernels = trace.kernels
    starts = kernels["start_ns"].to_numpy(np.int64)
    ends = starts + kernels["duration_ns"].to_numpy(np.int64)
    columns = (trace.ranges[name].to_numpy() for name in ("rank", "start_ns", "duration_ns"))
    mark_rank, mark_start, mark_took = (column[step_rows(trace.ranges)] for column in columns)
    found = {}
    for rows in rows_by(kernels, "rank"):
        rank = int(kernels["rank"].iloc[rows[0]])
        begin_ns, end_ns = int(starts[rows].min()), int(ends[rows].max())
        mine = mark_rank == rank
        first_ns, last_ns = begin_ns, end_ns
        if mine.any():
            first_ns = int(mark_start[mine].min())
            last_ns = int((mark_start + mark_took)[mine].max())
        found[rank] = _Span(min(begin_ns, first_ns), max(end_ns, last_ns), first_ns, last_ns)
    return found


@dataclass(frozen=True)
class Denominator:
    """The time that every share and every time per step of a trace refers to.

    The step of a job is what its user waits for: the mean step of the GPU whose steps took longest.
    It is the step of every GPU of the job.
    """

    time_ns: int
    """Sum over the GPUs of the job's step, in whole ns, rounded up."""
    num_gpu_steps: int
    """Steps of all GPUs added up; the number of GPUs where none is marked."""
    imbalance_ns: int = 0
    """How much longer that is than the steps of each GPU, from first to last, added up."""

    @property
    def step_ns(self) -> int:
        """The mean step of the job, or its window where no step is marked, in whole ns."""
        return (2 * self.time_ns + self.num_gpu_steps) // (2 * self.num_gpu_steps)


@once_per_trace
def denominator(trace: Trace) -> Denominator:
    """Return the time that every share and every time per step of a trace refers to.

    A GPU's steps last from the host's entry into the first to the end of the last, on the host or
    on the device, whichever is later, without what was launched before the first; its window where
    no step is marked. Idle time at these edges is idle time of a step. In host mode what began
    before the first step or after the last is in none. Without a timeline it is all device time.
    """
    num_gpu_steps = count_gpu_steps(trace)
    if not trace.has_timeline or not len(trace.kernels):
        return Denominator(int(trace.kernels["duration_ns"].sum()), count_steps_or_gpus(trace))
    steps, spans, lead = _steps_of_ranks(trace), _spans(trace), find_lead(trace).of_gpus
    took = [
        (
            spans[rank].end_ns - spans[rank].begin_ns - lead.get((rank, device), 0),
            steps[rank] if num_gpu_steps else 1,
        )
        for rank, device in gpus_used(trace.kernels)
    ]
    number = sum(of_gpu for _, of_gpu in took)
    step_ns = max(Fraction(time_ns, of_gpu) for time_ns, of_gpu in took)
    time_ns = math.ceil(number * step_ns)
    return Denominator(time_ns, number, time_ns - sum(time_ns for time_ns, _ in took))


@once_per_trace
def split_steps(trace: Trace) -> pd.DataFrame:
    """Split the time of the denominator as `split_window` does the window; adds up to it exactly.

    Idle time at the edges of the steps counts. In host mode no row of `idle` tells of it. By how
    much steps of GPUs are shorter than the job's has the part `IMBALANCE`.
    """
    lead, whole = find_lead(trace), denominator(trace)
    idle_ns = trace.idle["duration_ns"].to_numpy(np.int64) - lead.idle_ns
    split = split_window(trace, lead.kernels, idle_ns, whole.time_ns - whole.imbalance_ns)
    if not whole.imbalance_ns:
        return split
    added = {
        "phase": [None],
        "part": [IMBALANCE],
        "is_idle": [True],
        "time_ns": [whole.imbalance_ns],
    }
    # A key that is missing everywhere would come out as a column of floats.
    types = {"phase": object, "part": object}
    both = [split, pd.DataFrame(added)]
    rows: pd.DataFrame = pd.concat([one.astype(types) for one in both], ignore_index=True)
    return rows


def without_lead(trace: Trace) -> Trace:
    """Return the trace in which what `find_lead` finds in no step has no kind.

    Rows keep their places. The idle time in no step has no cause and no duration.
    """
    lead = find_lead(trace)
    if not lead.time_ns and not lead.kernels.any():
        return trace
    took = trace.idle["duration_ns"] - lead.idle_ns
    idle = trace.idle.assign(
        duration_ns=took,
        recoverable_ns=trace.idle["recoverable_ns"].clip(upper=took),
        cause=trace.idle["cause"].mask((lead.idle_ns > 0) & (took == 0)),
    )
    kind = trace.kernels["kind"].mask(lead.kernels)
    return replace(trace.with_kernels(kind=kind), idle=idle)


@once_per_trace
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
    lane = number_rows(kernels, ["rank", "device", "stream"])
    first = np.full(int(lane.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, lane[~is_orphan], start[~is_orphan])
    has_launches = (first < np.iinfo(np.int64).max)[lane]
    rows = is_early | (is_orphan & has_launches & (start < first[lane]))
    ends: dict[tuple[int, int], int] = {}
    ranks, devices = kernels["rank"].to_numpy(), kernels["device"].to_numpy()
    for rank, device in pairs_in(kernels[rows], "rank", "device"):
        of_gpu = (ranks == rank) & (devices == device)
        last_ns = int(end[rows & of_gpu].max())
        # A stream without any launch has nothing but its times.
        rows |= is_orphan & of_gpu & ~has_launches & (start < last_ns)
        ends[rank, device] = int(end[rows & of_gpu].max())
    return rows, ends


@once_per_trace
def after_launches(trace: Trace) -> np.ndarray:
    """Tell which activities the host launched after the last step of their rank.

    There are none where it launches between the steps as well: marks lie around a part of each.
    """
    kernels, ranges = trace.kernels, trace.ranges
    marks = step_rows(ranges)
    is_attributed = "launch_row" in kernels and "step" in kernels
    if not len(marks) or not is_attributed or not trace.has_timeline:
        return np.zeros(len(kernels), dtype=bool)
    starts = ranges["start_ns"].to_numpy(np.int64)
    ends = starts + ranges["duration_ns"].to_numpy(np.int64)
    rank, rank_of_mark = kernels["rank"].to_numpy(), ranges["rank"].to_numpy()[marks]
    # No launch lies after the steps of a rank that has none.
    first, last = np.full((2, len(rank)), np.iinfo(np.int64).max)
    for one in np.unique(rank_of_mark).tolist():
        mine = marks[rank_of_mark == one]
        first[rank == one], last[rank == one] = starts[mine].min(), ends[mine].max()
    launch = kernels["launch_row"].to_numpy(np.int64, na_value=-1)
    is_in_step = kernels["step"].notna().to_numpy(bool)
    is_known = (launch >= 0) & ~is_in_step
    is_after = is_known & (starts[launch] >= last)
    is_between = is_known & ~is_after & (starts[launch] >= first)
    for one in np.unique(rank[is_after]).tolist():
        of_one = rank == one
        if is_between[of_one].sum() > _MOST_BETWEEN * is_in_step[of_one].sum():
            is_after[of_one] = False
    return np.asarray(is_after)


@once_per_trace
def outside_steps(trace: Trace) -> np.ndarray:
    """Tell which activities were launched before the first step or after the last one."""
    return np.asarray(before_launches(trace)[0] | after_launches(trace))


def _launched_early(trace: Trace) -> np.ndarray:
    """Tell which activities the host launched before the first step of their rank."""
    kernels, ranges = trace.kernels, trace.ranges
    marks = step_rows(ranges)
    if not len(marks):
        return np.zeros(len(kernels), dtype=bool)
    begins = ranges["start_ns"].to_numpy(np.int64)
    rank, rank_of_mark = kernels["rank"].to_numpy(), ranges["rank"].to_numpy()[marks]
    limit = np.full(len(kernels), np.iinfo(np.int64).min)
    for one in np.unique(rank_of_mark).tolist():
        limit[rank == one] = begins[marks[rank_of_mark == one]].min()
    launch = kernels["launch_row"].to_numpy(np.int64, na_value=-1)
    is_known = (launch >= 0) & kernels["step"].isna().to_numpy(bool)
    return np.asarray(is_known & (begins[launch] < limit))


@dataclass(frozen=True)
class StepTimes:
    """How long each step took, in ns, and how that was told."""

    recorded_ns: tuple[int, ...]
    unrecorded_ns: tuple[int, ...]
    """Durations of unrecorded steps after the warm-up, on the same clock."""
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


def whole_ns(trace: Trace) -> int:
    """Return what all shares of a trace are of, in ns: a step of the job."""
    return denominator(trace).step_ns


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


_PLACE = ("rank", "device", "stream")
_KERNEL = ("name", "grid", "block")
_MOST_TRIED = 64


def find_recurring(kernels: pd.DataFrame, is_seen: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
    """Return for each row that was not seen a row in the same place, `NO_ROW` where none is.

    A recording often begins amid a step whose launches it has not seen. Where the launches of a
    stream that were seen repeat exactly, kernel by kernel with the same work, at least once as a
    whole, those right before and after them are taken to go on in the same way, as far as their
    names and grids do. Where a recorder takes grids from the launch, one that was not seen has
    none.

    `is_seen` tells whose launch was recorded; `num_bytes` is their work, negative where unknown.
    """
    found = np.full(len(kernels), NO_ROW, dtype=np.int64)
    if is_seen.all() or not is_seen.any():
        return found
    codes = pd.DataFrame({c: kernels[c].cat.codes.to_numpy() for c in _KERNEL})
    kernel = codes.to_numpy().T
    work = number_rows(codes.assign(work=num_bytes), [*_KERNEL, "work"])
    order = np.argsort(kernels["start_ns"].to_numpy(), kind="stable")
    place = number_rows(kernels[list(_PLACE)].iloc[order], _PLACE)
    for stream in np.unique(place[~is_seen[order]]):
        rows = order[place == stream]
        begin, end = _longest_run(is_seen[rows])
        period = find_period(work[rows[begin:end]])
        if period is not None:
            like = _continued(kernel[:, rows], begin, end, period)
            goes_on = like != NO_ROW
            found[rows[goes_on]] = rows[like[goes_on]]
    return found


def find_period(values: np.ndarray) -> int | None:
    """Return after how many the values repeat, the least that fits twice; None if they do not."""
    if not len(values):
        return None
    _, member, number = np.unique(values, return_inverse=True, return_counts=True)
    # Every value comes again after a period: the rarest leaves the fewest to try.
    places = np.flatnonzero(member == np.argmin(number))
    for period in (places[1 : _MOST_TRIED + 1] - places[0]).tolist():
        if 2 * period <= len(values) and np.array_equal(values[period:], values[:-period]):
            return int(period)
    return None


def _longest_run(is_seen: np.ndarray) -> tuple[int, int]:
    """Return where the longest run of true values begins, and where it has ended."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_seen, [False]]).astype(np.int8)))
    begins, ends = edges[::2], edges[1::2]
    if not len(begins):
        return 0, 0
    longest = int(np.argmax(ends - begins))
    return int(begins[longest]), int(ends[longest])


def _continued(kernel: np.ndarray, begin: int, end: int, period: int) -> np.ndarray:
    """Return the place in the run of what lies around it, as far as kernels go on like it.

    A row of `kernel` for the codes of names, of grids and of blocks; negative where missing.
    """
    place = np.arange(kernel.shape[1])
    like = begin + (place - begin) % period
    other = kernel[:, like]
    differs = ((kernel != other) & (kernel >= 0) & (other >= 0)).any(axis=0)
    before, after = np.flatnonzero(differs[:begin]), np.flatnonzero(differs[end:])
    first = before[-1] + 1 if len(before) else 0
    last = end + after[0] if len(after) else len(place)
    is_outside = (place < begin) | (place >= end)
    return np.where(is_outside & (place >= first) & (place < last), like, NO_ROW)
