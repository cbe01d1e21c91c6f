"""Large parts of a step that no rule explains, with the way to learn more."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from kprof.analyze.attribution.ledger import count_launches
from kprof.analyze.attribution.overlap import allotted_time
from kprof.analyze.attribution.steps import find_lead, outside_steps
from kprof.analyze.energy import devices_in
from kprof.analyze.findings.claims import (
    clipped,
    idle_places,
    in_words,
    percent,
    size_in_words,
    work_places,
)
from kprof.analyze.findings.one_offs import work_once
from kprof.analyze.findings.queries import (
    count_steps,
    is_one_of,
    limits,
    per_step,
    share_of_whole,
    total_ns,
    whole_of,
)
from kprof.analyze.idle import causes
from kprof.analyze.intervals import NOTHING
from kprof.findings import Finding, Fix
from kprof.trace import Trace

RULE = "unexplained_time"
NO_FIX = Fix()
# A larger share of a step, or of the window, is never left without a word.
LARGE_SHARE = 0.2
# Findings that are about this share of a line explain it.
EXPLAINED = 0.5
# Less overlap than this, as a share of a line, is not worth a word.
UNSEEN = 0.005
NUM_OPERATORS = 3
NUM_NAMES = 3

STACKS = "record Python's stacks: kprof run --stacks SCRIPT"
SHAPES = "record the operators' shapes: kprof run SCRIPT"
BOTH = "record the operators' shapes and Python's stacks: kprof run --stacks SCRIPT"
MEMORY = "record every allocation: kprof run --memory SCRIPT"
RECORD = "record fewer steps, with one profiler at a time: kprof run --steps 1 SCRIPT"
LESS = "record fewer details: kprof run --no-shapes SCRIPT"
# Where all that were opened together do not tell.
MESSAGES = "see which messages can be hidden or joined: kprof playbook exposed_collectives"
STREAMS = "which event an activity waited for is not in the recording"
# Tools of NVIDIA that show more.
NSYS = "Nsight Systems shows it: kprof run --nsys SCRIPT"
NCU = "count their bound: kprof run --ncu SCRIPT"
OTHERS = "count their bound with the profiler of the device's vendor"
NVTX = (
    "name the program's parts with NVTX ranges; of Python record stacks: kprof run --stacks SCRIPT"
)
OF_NVIDIA = re.compile(r"NVIDIA|CUDA|Tesla|GeForce|Quadro")
OTHER_VENDORS = re.compile(r"AMD|Radeon|Instinct|HIP |gfx\d|Intel|Gaudi|Ascend|MTIA|ARTEMIS")
LEARN = {
    causes.LAUNCH_BOUND: STACKS,
    causes.DATA_LOADING: STACKS,
    causes.SYNCHRONIZATION: STACKS,
    causes.PAGEABLE_COPY: STACKS,
    causes.ALLOCATOR: MEMORY,
    causes.COLLECTIVE_WAIT: "record all ranks, and open their traces together: kprof open FOLDER",
    causes.DEPENDENCY_WAIT: STREAMS,
    causes.BETWEEN_KERNELS: "fewer, larger kernels have fewer pauses: kprof playbook tiny_kernels",
    causes.PROFILER: LESS,
    causes.NO_WORK: STACKS,
}
MEANINGS = {
    causes.LAUNCH_BOUND: "because the host had not launched the next activity yet",
    causes.DATA_LOADING: "while the host waits for data",
    causes.SYNCHRONIZATION: "because the host had waited for the GPU, and launched late afterwards",
    causes.PAGEABLE_COPY: "while the host copies from memory that is not pinned",
    causes.ALLOCATOR: "while the host allocates or frees memory",
    causes.COLLECTIVE_WAIT: "while the host or the next kernel waits for other ranks",
    causes.DEPENDENCY_WAIT: "because an activity that was launched in time waits for another stream"
    ", another node of its graph, or work that was not recorded",
    causes.BETWEEN_KERNELS: "for its own delay from one activity to the next",
    causes.PROFILER: "for the recorder's own work",
    causes.NO_WORK: "while the host sleeps, or waits to be asked for something",
}
NOT_KNOWN = "and the host's work meanwhile is not recorded"
LAUNCHED = "although the host had launched the next activity"


def find_unexplained(trace: Trace, findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the lines above a fifth of a step that no finding is about, largest first.

    Lines are causes of idle time, kinds of activities, and a single long gap. Without a GPU they
    are the largest operators by their own time. Launches that left no activity come before all
    lines.
    """
    lost = list(_lost_launches(trace))
    if trace.is_host_only:
        found = [*_operators(trace), *_idle_lines(trace, findings)]
        return (*lost, *(one for _, one in found))
    lines = [*_idle_lines(trace, findings), *_work_lines(trace, findings)]
    if trace.has_timeline:
        lines += _gap(trace, findings, [one for _, one in lines])
    return (*lost, *(one for _, one in sorted(lines, key=lambda line: -line[0])))


def find_work_once(trace: Trace) -> Iterator[Finding]:
    """Yield one finding where work that one step alone did takes a large share of the steps."""
    rows = np.flatnonzero(work_once(trace))
    spent = int(allotted_time(trace)[rows].sum())
    if share_of_whole(trace, spent) > LARGE_SHARE:
        number = "One activity" if len(rows) == 1 else f"{len(rows):,} activities"
        claim = (
            f"{number} of one step alone, as of a start or an end, took {in_words(spent)}: "
            f"{percent(share_of_whole(trace, spent))} of all steps, and no part of a usual one"
        )
        yield _finding(claim, _largest_names(trace, rows), "", rows=rows)


def _lost_launches(trace: Trace) -> Iterator[Finding]:
    """Yield one finding where a large share of the launches left no activity."""
    launches = count_launches(trace)
    number = sum(of_rank.number for of_rank in launches)
    lost = sum(of_rank.num_lost for of_rank in launches)
    share = lost / max(number, 1)
    if share > LARGE_SHARE:
        meanwhile = "" if trace.is_host_only else ", and idle time may have been busy"
        claim = (
            f"{lost:,} of {number:,} launches of kernels and graphs ({percent(share)}) left no "
            f"activity in the recording: their time on the GPU is missing{meanwhile}"
        )
        yield _finding(claim, (), RECORD)


def _idle_lines(trace: Trace, findings: Sequence[Finding]) -> Iterator[tuple[float, Finding]]:
    """Yield the causes of idle time that are large and not explained, with their time."""
    idle = trace.idle
    took = idle["duration_ns"].to_numpy(np.int64)
    is_told = _told(len(idle), (one.idle_rows for one in findings))
    codes = idle["cause"].cat.codes.to_numpy()
    for code in np.unique(codes[took > 0]).tolist():
        rows = np.flatnonzero((codes == code) & (took > 0))
        line_ns = int(took[rows].sum())
        share = share_of_whole(trace, line_ns)
        if share <= LARGE_SHARE or took[rows][is_told[rows]].sum() >= EXPLAINED * line_ns:
            continue
        cause = str(idle["cause"].cat.categories[code]) if code >= 0 else None
        who = "No operator runs" if trace.is_host_only else "The GPU is idle"
        why = MEANINGS[cause] if cause else _why_unknown(trace, rows)
        claim = (
            f"{who} for {in_words(per_step(trace, line_ns))} of {whole_of(trace)} "
            f"({percent(share)} of it) {why}{f' ({cause})' if cause else ''}"
        )
        learn = _not_yet(_next_step(cause, trace) if cause else STACKS, trace)
        if cause == causes.DEPENDENCY_WAIT and is_of_nvidia(trace):
            learn = "; ".join(filter(None, [learn, _not_yet(NSYS, trace)]))
        details = (*_longest_gap(trace, rows), *idle_places(trace, rows[_is_placed(trace, rows)]))
        fix = Fix(graphs=cause == causes.LAUNCH_BOUND and not trace.is_host_only)
        yield line_ns, _finding(claim, details, learn, idle_rows=rows, fix=fix)


def _why_unknown(trace: Trace, rows: np.ndarray) -> str:
    """Say whether the host or the device was late in most of these pieces."""
    idle, kernels, ranges = trace.idle.iloc[rows], trace.kernels, trace.ranges
    ended_by = idle["kernel_row"].to_numpy(np.int64, na_value=NOTHING)
    launch = np.append(kernels["launch_row"].to_numpy(np.int64, na_value=NOTHING), NOTHING)
    never = np.iinfo(np.int64).max
    called = np.append(ranges["start_ns"].to_numpy(np.int64), never)[launch[ended_by]]
    took = idle["duration_ns"].to_numpy(np.int64)
    is_launched = called <= idle["start_ns"].to_numpy(np.int64)
    return LAUNCHED if 2 * took[is_launched].sum() > took.sum() else NOT_KNOWN


def _next_step(cause: str, trace: Trace) -> str:
    is_of_ranks = cause == causes.COLLECTIVE_WAIT and trace.meta.num_ranks > 1
    return MESSAGES if is_of_ranks else LEARN[cause]


def _not_yet(learn: str, trace: Trace) -> str:
    """Return the advice on how to record, or nothing where it was recorded so."""
    has_stacks = bool((trace.ranges["kind"] == "python").any())
    has_shapes = bool(trace.ranges["input_shapes"].notna().any())
    is_done = {
        STACKS: has_stacks,
        SHAPES: has_shapes,
        MEMORY: bool(devices_in(trace.samples, "profiler")),
        NSYS: trace.meta.tool == "nsys",
        NCU: bool(trace.kernels["counted_ns"].notna().any()),
        LESS: not has_shapes,
    }
    if learn == STACKS and trace.meta.tool == "nsys" and not (trace.ranges["kind"] == "op").any():
        # Perhaps no program of Python's.
        return NVTX
    if learn == BOTH and (has_shapes or has_stacks):
        learn = SHAPES if has_stacks else STACKS
    return "" if is_done.get(learn, False) else learn


def _is_placed(trace: Trace, rows: np.ndarray) -> np.ndarray:
    placed = trace.idle["place"].notna() | trace.idle["line"].notna()
    return np.asarray(placed.to_numpy(bool)[rows])


def _longest_gap(trace: Trace, rows: np.ndarray) -> tuple[str, ...]:
    """Say which activity ended the longest of these pieces, and how long it is."""
    took = trace.idle["duration_ns"].to_numpy(np.int64)
    row = int(rows[took[rows].argmax()])
    ended_by = int(trace.idle["kernel_row"].to_numpy(np.int64, na_value=-1)[row])
    name = clipped(str(trace.kernels["name"].iloc[ended_by])) if ended_by >= 0 else None
    where = " in all steps" if whole_of(trace) == "a step" else ""
    number = "One gap of" if len(rows) == 1 else f"{len(rows):,} gaps{where}, the longest of"
    before = f", before {name}" if name else ""
    return (f"{number} {in_words(int(took[row]))}{before}",)


def _work_lines(trace: Trace, findings: Sequence[Finding]) -> Iterator[tuple[float, Finding]]:
    """Yield the kinds of activities that are large and not explained, with their time."""
    kernels = trace.kernels
    # Activities launched before the first step are in none.
    is_seen = ~outside_steps(trace) & trace.kernels["name"].notna().to_numpy(bool)
    allotted = np.where(is_seen, allotted_time(trace), 0)
    is_told = _told(len(kernels), (one.rows for one in findings))
    codes, kinds = pd.factorize(kernels["kind"])
    for code in pd.unique(codes).tolist():
        kind = None if code < 0 else kinds[code]
        rows = np.flatnonzero((codes == code) & (allotted > 0))
        if not len(rows):
            continue
        line_ns = int(allotted[rows].sum())
        share = share_of_whole(trace, line_ns)
        if share <= LARGE_SHARE or allotted[rows][is_told[rows]].sum() >= EXPLAINED * line_ns:
            continue
        name = f"Activities of the kind {kind}" if kind else "Activities of unknown kind"
        claim = (
            f"{name} take {in_words(per_step(trace, line_ns))} of {whole_of(trace)} "
            f"({percent(share)} of it){_overlapped(trace, rows, line_ns)}, and no rule finds a fix"
            f"{_reached(trace, rows)}"
        )
        learn = _not_yet(NCU, trace) if is_of_nvidia(trace) else OTHERS
        if _are_transfers(trace, rows):
            copies = "find the code that copies, and whether it is needed"
            learn = "; ".join(filter(None, [copies, _not_yet(STACKS, trace)]))
        if kind == "collective":
            learn = _next_step(causes.COLLECTIVE_WAIT, trace)
        details = (*_largest_names(trace, rows), *work_places(trace, rows))
        yield line_ns, _finding(claim, details, learn, rows=rows)


def _overlapped(trace: Trace, rows: np.ndarray, line_ns: int) -> str:
    """Say how much longer these activities run, where others overlap them."""
    hidden_ns = total_ns(trace, rows) - line_ns
    if hidden_ns <= UNSEEN * line_ns:
        return ""
    return f" and {in_words(per_step(trace, hidden_ns))} more while others run"


def _reached(trace: Trace, rows: np.ndarray) -> str:
    """Say how near these activities are to their roofline, as far as that is known."""
    if _are_transfers(trace, rows):
        return _rate(trace, rows)
    limit = trace.kernels["limit_ns"]
    known = rows[limit.notna().to_numpy(bool)[rows]]
    spent = total_ns(trace, known)
    if not spent:
        has_work = trace.kernels[["bytes", "flops"]].iloc[rows].notna().to_numpy().any()
        return f": {'the peaks of the device are' if has_work else 'their work is'} not known"
    reached = percent(int(limits(trace)[known].sum()) / spent)
    part = spent / max(total_ns(trace, rows), 1)
    where = "" if part > 0.995 else f", as far as it is known ({percent(part)} of their time)"
    return f": they reach {reached} of their roofline{where}"


def is_of_nvidia(trace: Trace) -> bool:
    """Tell whether the devices are NVIDIA's, by their names and the calls of their runtime."""
    names = [gpu.name for gpu in trace.meta.gpus]
    if any(OTHER_VENDORS.search(name) for name in names):
        return False
    if any(OF_NVIDIA.search(name) for name in names):
        return True
    ranges = trace.ranges
    calls = ranges["name"][(ranges["kind"] == "runtime").to_numpy(bool)].unique()
    return not len(calls) or any(str(name).startswith("cu") for name in calls)


def _are_transfers(trace: Trace, rows: np.ndarray) -> bool:
    """Tell whether most of the time of these rows is that of copies and sets without a kernel."""
    moves = is_one_of(trace.kernels["activity"], "memcpy", "memset")[rows]
    return total_ns(trace, rows[moves]) > EXPLAINED * total_ns(trace, rows)


def _rate(trace: Trace, rows: np.ndarray) -> str:
    """Say how much copies move, and how fast, as far as that is known."""
    moved = trace.kernels["copied_bytes"].iloc[rows]
    known = moved.notna().to_numpy(bool)
    spent, size = total_ns(trace, rows[known]), int(moved.sum())
    if not spent or not size:
        return ": how much they move is not known"
    per = f" in {whole_of(trace)}" if whole_of(trace) == "a step" else ""
    return f": they move {size_in_words(per_step(trace, size))}{per}, at {size / spent:,.1f} GB/s"


def _largest_names(trace: Trace, rows: np.ndarray) -> tuple[str, ...]:
    names = trace.kernels["name"].iloc[rows].astype(str)
    sums = trace.kernels["duration_ns"].iloc[rows].groupby(names).sum().nlargest(NUM_NAMES)
    whole = whole_of(trace)
    return tuple(
        f"{clipped(str(name))}: {in_words(per_step(trace, time_ns))} of {whole}"
        for name, time_ns in sums.items()
    )


def _gap(
    trace: Trace, findings: Sequence[Finding], lines: Sequence[Finding]
) -> list[tuple[float, Finding]]:
    """Return the longest gap where it is large and neither a finding nor a line is about it."""
    idle, kernels = trace.idle, trace.kernels
    if not kernels["gap_before_ns"].notna().any():
        return []
    is_told = _told(len(idle), (one.idle_rows for one in (*findings, *lines)))
    ended_by = idle["kernel_row"].to_numpy(np.int64, na_value=-1)
    took = np.where(idle["edge"].isna(), idle["duration_ns"].to_numpy(np.int64), 0)
    sums = np.bincount(ended_by[ended_by >= 0], took[ended_by >= 0], len(kernels))
    row, gap_ns = int(sums.argmax()), int(sums.max())
    rows = np.flatnonzero((ended_by == row) & (took > 0))
    share = share_of_whole(trace, gap_ns)
    told_ns = int(took[rows][is_told[rows]].sum())
    if share <= LARGE_SHARE or told_ns >= EXPLAINED * gap_ns:
        return []
    claim = (
        f"In a single gap the GPU is idle for {in_words(gap_ns)}: "
        f"{in_words(per_step(trace, gap_ns))} of {whole_of(trace)} ({percent(share)} of it)"
    )
    causes_of = idle["cause"].iloc[rows].astype(object)
    parts = [
        f"{in_words(ns)}: {'cause not known' if cause is None else cause}"
        for cause, ns in zip(causes_of.where(causes_of.notna(), None), took[rows], strict=True)
    ]
    details = (*_longest_gap(trace, rows), *parts[:NUM_NAMES])
    return [
        (per_step(trace, gap_ns), _finding(claim, details, _not_yet(STACKS, trace), idle_rows=rows))
    ]


def _operators(trace: Trace) -> Iterator[tuple[float, Finding]]:
    """Yield the largest operators of a host by their own time, where there is no GPU.

    Those in steps, if there are any.
    """
    is_outside = find_lead(trace).kernels
    is_asked = ~is_outside if not is_outside.all() else is_outside
    names = trace.kernels["name"].astype(str)
    took = trace.kernels["duration_ns"][is_asked]
    sums = took.groupby(names[is_asked]).sum().nlargest(NUM_OPERATORS)
    # Work of one step alone has no name here.
    if sums.empty:
        return
    spent, steps = int(took.sum()), 1 if is_outside.all() else count_steps(trace)
    said = ", ".join(
        f"{clipped(str(name))} {in_words(ns / steps)} ({percent(ns / max(spent, 1))})"
        for name, ns in sums.items()
    )
    where = "outside of all steps, where all of them ran," if is_outside.all() else ""
    where = where or f"in {whole_of(trace)}"
    claim = (
        "No GPU activity was recorded, so rules about a device do not apply; of the operators' own "
        f"time of {in_words(spent / steps)} {where} the largest are {said}"
    )
    rows = np.flatnonzero(names.isin(list(sums.index)).to_numpy(bool) & is_asked)
    learn = _not_yet(BOTH, trace)
    places = () if is_outside.all() else work_places(trace, rows)
    yield float(spent), _finding(claim, places, learn, rows=rows)


def _told(number: int, parts: Iterator[tuple[int, ...]]) -> np.ndarray:
    is_told = np.zeros(number, dtype=bool)
    for rows in parts:
        is_told[list(rows)] = True
    return is_told


def _finding(
    claim: str,
    details: Sequence[str],
    learn: str,
    *,
    rows: np.ndarray | None = None,
    idle_rows: np.ndarray | None = None,
    fix: Fix = NO_FIX,
) -> Finding:
    return Finding(
        rule=RULE,
        claim=claim,
        confidence="high",
        effort="medium",
        rows=() if rows is None else tuple(rows.tolist()),
        idle_rows=() if idle_rows is None else tuple(idle_rows.tolist()),
        details=(*details, *((f"To learn more: {learn}",) if learn else ())),
        fix=fix,
    )
