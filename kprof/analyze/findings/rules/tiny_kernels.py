"""tiny_kernels: the GPU is busy with kernels so short that starting them takes the time."""

from __future__ import annotations

import numpy as np

from kprof.analyze.findings.claims import in_words, percent, proof_by_copy, work_places
from kprof.analyze.findings.patterns import launch_order
from kprof.analyze.findings.queries import (
    count_steps,
    durations,
    idle_of,
    is_one_of,
    per_step,
    share_of_whole,
    total_ns,
    whole_of,
)
from kprof.analyze.findings.rules.launch_bound_host import LEAST_SHARE as LAUNCH_BOUND_SHARE
from kprof.analyze.idle.causes import BETWEEN_KERNELS, LAUNCH_BOUND
from kprof.analyze.whatif.changes import SHORTEST_KERNEL_NS
from kprof.findings import Finding, Fix
from kprof.trace import Trace

# It does not see what more particular rules explain.
IS_GENERAL = True

# A kernel needs some 2 µs to begin and to end: a shorter one than this spends most of it so.
TINY_NS = 5_000
LEAST_NUMBER = 0.5
LEAST_SHARE = 0.1
FUSIBLE = ("elementwise", "copy", "set", "reduction", "norm", "softmax", "indexing", "random")


def check(trace: Trace) -> list[Finding]:
    """Find runs of tiny kernels that a compiler would join; where the host is late, nothing."""
    _, late_ns = idle_of(trace, LAUNCH_BOUND)
    if share_of_whole(trace, late_ns) >= LAUNCH_BOUND_SHARE:
        return []
    is_kernel = is_one_of(trace.kernels["activity"], "kernel")
    took = durations(trace)
    is_tiny = is_kernel & (took < TINY_NS) & is_one_of(trace.kernels["kind"], *FUSIBLE)
    if is_tiny.sum() < LEAST_NUMBER * max(int(is_kernel.sum()), 1):
        return []
    rows = np.flatnonzero(is_tiny)
    between = _idle_before(trace, rows)
    share = share_of_whole(trace, total_ns(trace, rows) + between)
    if share < LEAST_SHARE:
        return []
    order = launch_order(trace)
    runs = int((np.diff(is_tiny[order].astype(int), prepend=0) == 1).sum())
    steps, whole = count_steps(trace), whole_of(trace)
    spent = in_words(per_step(trace, total_ns(trace, rows) + between))
    claim = (
        f"{len(rows) / steps:,.0f} of {is_kernel.sum() / steps:,.0f} kernels of {whole} last less "
        f"than {in_words(TINY_NS)}: they and the gaps before them take "
        f"{spent}, {percent(share)} of {whole_of(trace)}"
    )
    return [
        Finding(
            rule="tiny_kernels",
            claim=claim,
            confidence="medium",
            effort="medium",
            rows=tuple(rows.tolist()),
            details=work_places(trace, rows),
            fix=Fix(
                best_ns=min(2 * runs * SHORTEST_KERNEL_NS, total_ns(trace, rows)),
                modest_ns=total_ns(trace, rows) // 2,
                launches=runs,
            ),
            command=proof_by_copy(trace, "compiled"),
        )
    ]


def _idle_before(trace: Trace, rows: np.ndarray) -> int:
    """Return the device's own time before these activities."""
    idle = trace.idle
    mine = (idle["cause"] == BETWEEN_KERNELS).to_numpy(bool)
    mine = mine & np.isin(idle["kernel_row"].to_numpy(np.int64, na_value=-1), rows)
    return int(idle["duration_ns"].to_numpy(np.int64)[mine].sum())
