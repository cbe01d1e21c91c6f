"""Remedies: what kernels would take after a fix that fuses them."""

from __future__ import annotations

import numpy as np

from kprof.analyze.evidence import Int64s, is_one_of, total_ns
from kprof.analyze.what_if.changes import SHORTEST_KERNEL_NS
from kprof.finding import Remedy
from kprof.trace import Trace

# What good kernels reach of the bandwidth that a large copy has.
WELL_USED, POORLY_USED = 0.9, 1 / 3
LEFT_OVER = 0.1


def fused(trace: Trace, rows: Int64s, num_bytes: float, launches: int) -> Remedy:
    """Return the remedy of doing with `launches` what the rows do, in one pass over `num_bytes`.

    At best that is done at nine tenths of the memory's bandwidth; modestly at a third of it, or no
    better than the rows use it now, and a tenth of their time remains, which the kernel does not
    reach. Where the bytes are not known (0), anything from no gain to all of it.
    """
    took = total_ns(trace, rows)
    shortest = launches * SHORTEST_KERNEL_NS
    at_best = memory_ns(trace, num_bytes)
    moved = int(trace.kernels["bytes"].to_numpy(np.int64, na_value=0)[rows].sum())
    if not num_bytes or at_best is None or moved <= 0:
        return Remedy(best_ns=min(shortest, took), modest_ns=took, launches=launches)
    best = min(max(round(at_best / WELL_USED), shortest), took)
    slowly = max(took * num_bytes / moved, at_best / POORLY_USED, shortest)
    modest = min(round(slowly + LEFT_OVER * took), took)
    return Remedy(best_ns=best, modest_ns=modest, launches=launches)


def item_size(trace: Trace, rows: Int64s) -> int:
    """Return the bytes of an element of the model's type: 2 where some rows are of 16 bits."""
    is_half = is_one_of(trace.kernels["dtype"], "bf16", "fp16")[rows]
    return 2 if is_half.any() else 4


def memory_ns(trace: Trace, num_bytes: float) -> int | None:
    """Return how long moving so many bytes takes at the memory's bandwidth; None if not known."""
    device = trace.meta.device
    return round(num_bytes / device.memory_bytes_per_s * 1e9) if device else None
