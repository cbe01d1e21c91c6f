"""low_dram_bandwidth: kernels that only move data do so slowly."""

from __future__ import annotations

import numpy as np

from kprof.analyze.capture_quality.unanswered import why_no_ceilings, why_no_work
from kprof.analyze.findings.claims import clipped, in_words, percent
from kprof.analyze.findings.queries import (
    durations,
    is_one_of,
    limits,
    per_step,
    share_of_device,
    total_ns,
    whole_of,
    why_no_device,
)
from kprof.analyze.groupings import collapse_layers
from kprof.findings import Finding, Fix
from kprof.trace import Trace

NEEDS = (why_no_device, why_no_work, why_no_ceilings)
# A rule for one pattern describes the same activities more precisely.
IS_GENERAL = True

KINDS = ("elementwise", "copy", "norm", "reduction", "softmax", "indexing", "embedding")
# Share of the bandwidth: strided and scattered accesses are below, good layouts above.
REACHED = 0.4
# Shorter kernels are bound by their latency, not by the memory.
LEAST_NS = 10_000
# A single place below this share of the device time is not worth an edit.
LEAST_SHARE = 0.01
WELL, MODESTLY = 0.85, 0.55
NUM_PLACES = 3


def check(trace: Trace) -> list[Finding]:
    """Find operators of one sort of layer that use little of the memory's bandwidth."""
    kernels = trace.kernels
    took, limit = durations(trace), limits(trace)
    is_known = (kernels["limit_ns"].notna() & kernels["bytes"].notna()).to_numpy(bool)
    is_known = is_known & ~is_one_of(kernels["work_from"], "bounds")
    rows = np.flatnonzero(is_known & (took >= LEAST_NS) & is_one_of(kernels["kind"], *KINDS))
    if not len(rows):
        return []
    chosen = kernels.iloc[rows]
    named = [collapse_layers(chosen["module"]), chosen["op"], chosen["name"]]
    keys = [column.cat.codes.to_numpy() for column in named]
    groups = chosen["duration_ns"].groupby(keys, sort=False).indices
    slow = [
        rows[at]
        for at in groups.values()
        if limit[rows[at]].sum() < REACHED * took[rows[at]].sum()
        and share_of_device(trace, rows[at]) >= LEAST_SHARE
    ]
    if not slow:
        return []
    slow.sort(key=lambda group: -total_ns(trace, group))
    every = np.sort(np.concatenate(slow))
    at_limit, spent = int(limit[every].sum()), total_ns(trace, every)
    claim = (
        f"Kernels that only move data take {in_words(per_step(trace, spent))} of "
        f"{whole_of(trace)}, {percent(share_of_device(trace, every))} of the device time, and "
        f"reach {percent(at_limit / spent)} of the memory's bandwidth, by their minimum traffic"
    )
    return [
        Finding(
            rule="low_dram_bandwidth",
            claim=claim,
            confidence="medium",
            effort="medium",
            rows=tuple(every.tolist()),
            details=tuple(_place(trace, group) for group in slow[:NUM_PLACES]),
            fix=Fix(
                best_ns=min(round(at_limit / WELL), spent),
                modest_ns=min(round(at_limit / MODESTLY), spent),
            ),
        )
    ]


def _place(trace: Trace, group: np.ndarray) -> str:
    kernels = trace.kernels.iloc[group[:1]]
    module = collapse_layers(kernels["module"]).astype(object).iloc[0]
    names = [str(one) for one in (kernels["op"].iloc[0], module) if isinstance(one, str)]
    spent = total_ns(trace, group)
    reached = percent(int(limits(trace)[group].sum()) / max(spent, 1))
    where = clipped(" in ".join(names) or str(kernels["name"].iloc[0]))
    return f"{where}: {in_words(per_step(trace, spent))}, {reached} of the bandwidth"
