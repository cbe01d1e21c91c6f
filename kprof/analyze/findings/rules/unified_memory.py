"""unified_memory: pages move one after the other as the host and the GPU touch them."""

from __future__ import annotations

import numpy as np

from kprof.analyze.findings.claims import idle_places, in_words, percent, size_in_words
from kprof.analyze.findings.queries import (
    count_steps,
    exposed_ns,
    matches,
    per_step,
    share_of_whole,
    total_ns,
    whole_of,
)
from kprof.analyze.idle.causes import MIGRATION
from kprof.analyze.intervals import NOTHING
from kprof.findings import Finding
from kprof.trace import Trace

# One or two are a prefetch, or the first touch of a small buffer.
LEAST_MIGRATIONS = 10
LEAST_SHARE = 0.05


def check(trace: Trace) -> list[Finding]:
    """Find migrations of pages that the host waits for, or that kernels wait for as they run.

    How long the host computes between two of its own page faults is not recorded, nor how long a
    kernel would take without faults: the saving is unknown.
    """
    is_migration = matches(trace.kernels["name"], MIGRATION)
    rows = np.flatnonzero(is_migration)
    if len(rows) < LEAST_MIGRATIONS * count_steps(trace):
        return []
    ended_by = trace.idle["kernel_row"].to_numpy(np.int64, na_value=NOTHING)
    is_between = np.append(is_migration, False)[ended_by] & trace.idle["cause"].isna().to_numpy()
    idle_rows = np.flatnonzero(is_between)
    idle_ns = int(trace.idle["duration_ns"].to_numpy(np.int64)[idle_rows].sum())
    moving_ns = total_ns(trace, rows)
    share = share_of_whole(trace, moving_ns + idle_ns)
    if share < LEAST_SHARE:
        return []
    alone_ns = int(exposed_ns(trace, is_migration).sum())
    moved = trace.kernels["copied_bytes"].to_numpy(np.int64, na_value=0)[rows].sum()
    size = f" ({size_in_words(per_step(trace, moved))})" if moved else ""
    claim = (
        f"In {whole_of(trace)} {per_step(trace, len(rows)):,.0f} migrations of unified memory{size}"
        f" move pages as they are touched: {in_words(per_step(trace, moving_ns))}, "
        f"{in_words(per_step(trace, moving_ns - alone_ns))} of it while kernels wait for pages, "
        f"and {in_words(per_step(trace, idle_ns))} for which the GPU idles before them, as the "
        f"host computes or faults (together {percent(share)} of {whole_of(trace)})"
    )
    return [
        Finding(
            rule="unified_memory",
            claim=claim,
            confidence="high",
            effort="low",
            rows=tuple(rows.tolist()),
            idle_rows=tuple(idle_rows.tolist()),
            details=idle_places(trace, idle_rows),
        )
    ]
