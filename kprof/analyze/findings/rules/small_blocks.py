"""small_blocks: kernels whose blocks have fewer threads than a warp."""

from __future__ import annotations

import numpy as np

from kprof.analyze.findings.claims import in_words, percent, work_places
from kprof.analyze.findings.queries import (
    durations,
    is_one_of,
    per_step,
    share_of_device,
    sizes_of,
    total_ns,
    whole_of,
)
from kprof.findings import Finding, Fix
from kprof.trace import Trace

WARP = 32
# Threads of a block with which as many blocks as an SM holds fill it: 2,048 threads in 32 blocks
# on V100, A100 and H100, 1,024 in 16 on Turing (CUDA programming guide, compute capabilities).
FILLING = 64
# Below this share of the device time no launch shape is worth changing.
LEAST_SHARE = 0.03


def check(trace: Trace) -> list[Finding]:
    """Find kernels that leave lanes of their warps idle, and warps of their SMs.

    At best time falls as an SM then holds more threads; where something else limits it, it stays.
    """
    threads = sizes_of(trace.kernels["block"])
    is_small = (threads > 0) & (threads < WARP)
    rows = np.flatnonzero(is_small & ~is_one_of(trace.kernels["kind"], "collective"))
    share = share_of_device(trace, rows)
    if share < LEAST_SHARE:
        return []
    took, spent = durations(trace)[rows], total_ns(trace, rows)
    usual = float((threads[rows] * took).sum() / max(spent, 1))
    claim = (
        f"Kernels whose blocks have fewer threads than the {WARP} of a warp, {usual:,.0f} in the "
        f"mean, take {in_words(per_step(trace, spent))} of {whole_of(trace)}, {percent(share)} of "
        "the device time"
    )
    best_ns = int(np.rint(took * threads[rows] / FILLING).sum())
    return [
        Finding(
            rule="small_blocks",
            claim=claim,
            confidence="medium",
            effort="low",
            rows=tuple(rows.tolist()),
            details=work_places(trace, rows),
            fix=Fix(best_ns=best_ns, modest_ns=spent),
        )
    ]
