"""pageable_copies: the host waits for batches that it copies from memory that is not pinned."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kprof.analyze.findings.claims import idle_places, in_words, percent, size_in_words
from kprof.analyze.findings.queries import (
    count_steps,
    durations,
    exposed_ns,
    idle_of,
    matches,
    per_step,
    share_of_whole,
    total_ns,
    whole_of,
)
from kprof.analyze.idle.causes import PAGEABLE_COPY, PAGEABLE_UPLOAD
from kprof.findings import Finding, Fix
from kprof.trace import Trace

# Less than a hundredth of the step is not worth an edit.
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
    idle_rows, lost_ns = idle_of(trace, PAGEABLE_COPY)
    is_upload = matches(trace.kernels["name"], PAGEABLE_UPLOAD)
    uploads = np.flatnonzero(is_upload)
    moved = trace.kernels["copied_bytes"].to_numpy(np.int64, na_value=0)[uploads]
    took, exposed = durations(trace)[uploads], exposed_ns(trace, is_upload)
    best, modest = (_pinned_ns(moved, took, rate) for rate in RATES)
    slower_ns = int((exposed * (1 - modest / np.maximum(took, 1))).sum())
    if share_of_whole(trace, lost_ns + slower_ns) < LEAST_SHARE:
        return []
    is_slow = (exposed > 0) & (best < took)
    pinned_ns = int(best[is_slow].sum()), int(modest[is_slow].sum())
    waiting = Fix(idle_cause=PAGEABLE_COPY)
    faster = replace(waiting, best_ns=pinned_ns[0], modest_ns=pinned_ns[1])
    return [
        Finding(
            rule="pageable_copies",
            claim=_claim(trace, uploads, uploads[is_slow], pinned_ns, lost_ns),
            confidence="high",
            effort="low",
            rows=tuple(uploads[is_slow].tolist()),
            idle_rows=tuple(idle_rows.tolist()),
            details=idle_places(trace, idle_rows),
            fix=faster if is_slow.any() else waiting,
        )
    ]


def _pinned_ns(moved: np.ndarray, took: np.ndarray, bytes_per_s: float) -> np.ndarray:
    """Return the time of copies from pinned memory; as long as now where it is unknown."""
    pinned = np.rint(1e9 * moved / bytes_per_s).astype(np.int64)
    return np.where(moved > 0, np.minimum(pinned, took), took)


def _claim(
    trace: Trace, uploads: np.ndarray, slow: np.ndarray, pinned_ns: tuple[int, int], lost_ns: int
) -> str:
    steps, took_ns = count_steps(trace), total_ns(trace, slow)
    moved = trace.kernels["copied_bytes"].to_numpy(np.int64, na_value=0)[uploads].sum()
    number = f"{len(uploads) / steps:,.0f}"
    come = "copy{} in {} comes" if number == "1" else "copies{} in {} come"
    size = f", {size_in_words(moved / steps)} in all," if moved else ""
    found = []
    if len(slow):
        low, high = (in_words(per_step(trace, ns)) for ns in pinned_ns)
        those = "" if len(slow) == len(uploads) else " in those beside which nothing runs"
        took = in_words(per_step(trace, took_ns))
        found.append(f"{took}{those}, where pinned memory takes {low} to {high}")
    if lost_ns:
        found.append(f"{in_words(per_step(trace, lost_ns))} for which the GPU idles afterwards")
    share = f"{percent(share_of_whole(trace, took_ns + lost_ns))} of {whole_of(trace)}"
    return (
        f"{number} {come.format(size, whole_of(trace))} from memory that is not pinned, and the "
        f"host waits: {'; '.join(found)} ({f'together {share}' if len(found) > 1 else share})"
    )
