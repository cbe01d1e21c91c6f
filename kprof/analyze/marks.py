"""Which of a run's marks are its steps: of each rank some that come one after another.

A mark is a range of the kind `step`. More than one may be open at a time: torch's profiler marks
the steps of its schedule even while it only waits, beside kprof's own; two threads may mark the
same steps; a mark may lie around others. Everything that counts or times steps goes by these.

In a rank of a trace that kprof did not record and that holds no mark, other ranges imply them:
`Optimizer.step#` from end to end, else ranges that repeat at the top level of the main thread.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from kprof.analyze.autograd import is_evaluation, is_node
from kprof.analyze.nesting import parents
from kprof.analyze.recurring import find_period
from kprof.trace import Trace

# As torch's profiler calls a step of its schedule; kprof's own have a number alone.
OF_TORCH = "ProfilerStep#"
# The host's ranges may cross by some ns, and by one of the whole microseconds of an old file.
CROSSING_NS = 1_000
OF_OPTIMIZER = "Optimizer.step#"
# Ranges that PyTorch and libraries write, which are parts of a step.
_OF_LIBRARIES = re.compile(
    r"Optimizer\.|enumerate\(DataLoader\)|DistributedDataParallel|FullyShardedDataParallel|FSDP"
    r"|nccl|gloo|mpi|ucc|c10d|torch\.|torchvision|Torch-Compiled|## |CUDAGraph|TorchDynamo"
    r"|Inductor|PyTorch Profiler|record_param_comms|cub::|thrust|cublas|cudnn|cufft|autograd::",
    re.IGNORECASE,
)
# What a program does; Python's functions are also the profiler's own.
_OF_HOST = ("op", "runtime", "module", "range", "phase")
# A first interval with fewer of the launches of the others began before the recording.
_WHOLE = 0.9
# Ranges outside of which more than this share of launches was made are no steps.
_MOST_OUTSIDE = 0.5


@dataclass(frozen=True)
class Marks:
    """The marks of a trace, sorted out."""

    steps: np.ndarray
    """Rows of `ranges` that are steps, in the order of their starts; of a rank none overlap."""
    of_torch: np.ndarray
    """Rows that torch's profiler marked in ranks that kprof marked, too: no steps."""
    doubtful: np.ndarray
    """Rows left out because they overlap with the steps, though nothing else sets them apart."""


def sort_out(ranges: pd.DataFrame) -> Marks:
    """Decide which marks are steps.

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
    """Return the steps of one rank as rows of `ranges`, by the first rule that tells any."""
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
    if time.max() < _MOST_OUTSIDE * time.sum():
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
