"""pageable_copies: batches go to the GPU from memory that is not pinned, and the host waits."""

from __future__ import annotations

import numpy as np

from kprof.analyze.claims import idle_places, in_words, percent, size_in_words
from kprof.analyze.evidence import (
    count_steps,
    durations,
    exposed_ns,
    matches,
    per_step,
    recoverable_idle,
    share_of_window,
    total_ns,
    whole_of,
)
from kprof.analyze.idle.causes import PAGEABLE_COPY, PAGEABLE_UPLOAD
from kprof.finding import Finding, Remedy
from kprof.trace import Trace

# What costs less than a hundredth of the step is not worth an edit.
LEAST_SHARE = 0.01
# From pinned memory: 54.2 to 55.2 GB/s in 14 copies of 32 and 64 MiB over PCIe 5.0 to an H100; what
# PCIe 3.0 leaves of its 15.75, where the link is an old one or shared.
PINNED_BYTES_PER_S = 55e9
SLOW_PINNED_BYTES_PER_S = 12e9
RATES = PINNED_BYTES_PER_S, SLOW_PINNED_BYTES_PER_S


def check(trace: Trace) -> list[Finding]:
    """Find copies from pageable memory that the GPU waits for; pinned and free ones are silent.

    It waits in the copies, as far as nothing runs beside them, and for the host that made them.
    """
    idle_rows, lost_ns = recoverable_idle(trace, PAGEABLE_COPY)
    is_upload = matches(trace.kernels["name"], PAGEABLE_UPLOAD)
    rows = np.flatnonzero(is_upload)
    took = durations(trace)[rows]
    moved = trace.kernels["copied_bytes"].to_numpy(np.int64, na_value=0)[rows]
    best, modest = (_pinned_ns(moved, took, rate) for rate in RATES)
    exposed = exposed_ns(trace, is_upload)
    slower_ns = int((exposed * (1 - modest / np.maximum(took, 1))).sum())
    if share_of_window(trace, lost_ns + slower_ns) < LEAST_SHARE:
        return []
    claim = _claim(trace, rows, int(moved.sum()), (int(best.sum()), int(modest.sum())), lost_ns)
    return [
        Finding(
            rule="pageable_copies",
            claim=claim,
            confidence="high",
            effort="low",
            rows=tuple(rows.tolist()),
            idle_rows=tuple(idle_rows.tolist()),
            details=idle_places(trace, idle_rows),
            remedy=Remedy(int(best.sum()), int(modest.sum()), idle_cause=PAGEABLE_COPY),
        )
    ]


def _pinned_ns(moved: np.ndarray, took: np.ndarray, bytes_per_s: float) -> np.ndarray:
    """Return how long copies would take from pinned memory; as long as now where nobody knows."""
    pinned = np.rint(1e9 * moved / bytes_per_s).astype(np.int64)
    return np.where(moved > 0, np.minimum(pinned, took), took)


def _claim(
    trace: Trace, rows: np.ndarray, moved: int, pinned_ns: tuple[int, int], lost_ns: int
) -> str:
    steps, took_ns = count_steps(trace), total_ns(trace, rows)
    number = f"{len(rows) / steps:,.0f}"
    size = f", {size_in_words(moved / steps)} in all," if moved else ""
    faster = ""
    if pinned_ns[1] < took_ns:
        low, high = (in_words(per_step(trace, ns)) for ns in pinned_ns)
        faster = f" where pinned ones take {low} to {high}"
    idle = f", and the GPU idles for {in_words(per_step(trace, lost_ns))} after them"
    copies = "copy" if number == "1" else "copies"
    return (
        f"{number} {copies}{size} in {whole_of(trace)} from memory that is not pinned take "
        f"{in_words(per_step(trace, took_ns))}{faster}, the host waits for them"
        f"{idle if lost_ns else ''} ({percent(share_of_window(trace, took_ns + lost_ns))} of the "
        f"time)"
    )
