"""recompilation: torch.compile compiles while steps run, or has compiled the same code often."""

from __future__ import annotations

import re
from collections import defaultdict

import numpy as np

from kprof.analyze.findings.claims import in_words, percent
from kprof.analyze.findings.one_offs import COMPILING
from kprof.analyze.findings.queries import (
    count_host_steps,
    count_steps,
    matches,
    per_step,
    share_of_whole,
    whole_of,
)
from kprof.analyze.idle.causes import LAUNCH_BOUND
from kprof.analyze.intervals import Intervals, disjoint, length_in
from kprof.findings import Finding, Fix
from kprof.trace import Trace

NEEDS = ()

_REGION = re.compile(r"^Torch-Compiled Region: (\d+)/(\d+)")
# Each version is another graph for another shape or value; torch gives up at eight.
MANY_VERSIONS = 3


def check(trace: Trace) -> list[Finding]:
    """Find compiling within the window, and code that runs in several compiled versions."""
    ranges = trace.ranges
    rows = np.flatnonzero(matches(ranges["name"], COMPILING))
    if len(rows):
        return [_compiling(trace, rows)]
    versions: dict[str, set[str]] = defaultdict(set)
    regions = np.flatnonzero(matches(ranges["name"], _REGION.pattern))
    for name in set(ranges["name"].iloc[regions].astype(str)):
        found = _REGION.match(name)
        if found is not None:
            versions[found[1]].add(found[2])
    most = max(versions, key=lambda frame: len(versions[frame]), default="")
    if len(versions.get(most, ())) < MANY_VERSIONS:
        return []
    claim = (
        f"Compiled region {most} runs in {len(versions[most])} versions within the window: torch "
        "recompiles it for each new shape or value, and stops compiling after eight"
    )
    return [_finding(claim, regions, (), "medium")]


def _compiling(trace: Trace, rows: np.ndarray) -> Finding:
    """Return the finding of compilation in the window: the union of its ranges, which nest."""
    start = trace.ranges["start_ns"].to_numpy(np.int64)
    took = trace.ranges["duration_ns"].to_numpy(np.int64)
    union = disjoint(Intervals(start[rows], start[rows] + took[rows], rows))
    spent = int((union.end - union.start).sum())
    begins = trace.idle["start_ns"].to_numpy(np.int64)
    ends = begins + trace.idle["duration_ns"].to_numpy(np.int64)
    inside = length_in(union, begins, ends)
    idle_rows = np.flatnonzero(2 * inside > ends - begins)
    # The host's time passes on each of its GPUs.
    held = spent * count_steps(trace) / count_host_steps(trace)
    claim = (
        f"Compiling takes {in_words(per_step(trace, held))} of {whole_of(trace)} "
        f"({percent(share_of_whole(trace, held))} of {whole_of(trace)}), amid the recorded steps"
    )
    return _finding(claim, rows, tuple(idle_rows.tolist()), "high")


def _finding(claim: str, rows: np.ndarray, idle_rows: tuple[int, ...], confidence: str) -> Finding:
    return Finding(
        rule="recompilation",
        claim=claim,
        confidence="high" if confidence == "high" else "medium",
        effort="medium",
        range_rows=tuple(rows.tolist()),
        idle_rows=idle_rows,
        fix=Fix(idle_cause=LAUNCH_BOUND) if idle_rows else Fix(),
    )
