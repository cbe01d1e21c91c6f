"""pageable_copies: the host waits for copies from or to memory that is not pinned."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kprof.analyze.findings.claims import idle_places, in_words, percent, size_in_words
from kprof.analyze.findings.queries import (
    Int64s,
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
from kprof.analyze.idle.causes import PAGEABLE_COPY, PAGEABLE_DOWNLOAD, PAGEABLE_UPLOAD
from kprof.findings import Finding, Fix
from kprof.trace import Gpu, Trace

# Less than a hundredth of the step is not worth an edit.
LEAST_SHARE = 0.01
# Bytes a second from pinned memory by the first compute capability with the link: 54.2 to 55.2 GB/s
# in 14 copies of 32 and 64 MiB over PCIe 5.0 to an H100; of 4.0 and 3.0 the same share.
PINNED_BYTES_PER_S = (((9, 0), 55e9), ((8, 0), 27e9), ((0, 0), 13e9))
# Where several GPUs share a link, or the host is slow: 5.1 to 8.4 GB/s to a V100 with seven others.
SLOW_SHARE = 0.4
# Smaller copies take as long from pinned memory: the driver passes them on by itself.
LEAST_BYTES = 64 << 10
# Copies from pinned memory in the recording itself tell what the link does, if they are large.
LARGE_BYTES = 1 << 20
PINNED = r"(HtoD \(Pinned|DtoH \(.*Pinned\))"
PAGEABLE = f"({PAGEABLE_UPLOAD}|{PAGEABLE_DOWNLOAD})"


def check(trace: Trace) -> list[Finding]:
    """Find copies from pageable memory that the GPU waits for; pinned and free ones are silent.

    It waits in the copies, as far as nothing runs beside them, and for the host that made them.
    """
    idle_rows, lost_ns = idle_of(trace, PAGEABLE_COPY)
    is_pageable = matches(trace.kernels["name"], PAGEABLE)
    copies = np.flatnonzero(is_pageable)
    moved, took = _moved(trace)[copies], durations(trace)[copies]
    exposed = exposed_ns(trace, is_pageable)
    fast, slow = _pinned_rates(trace)
    best, modest = (_pinned_ns(moved, took, rate) for rate in (fast, slow))
    # At best: where the link is unknown, copies may be as fast as it is, or many times slower.
    slower_ns = int((exposed * (1 - best / np.maximum(took, 1))).sum())
    if share_of_whole(trace, lost_ns + slower_ns) < LEAST_SHARE:
        return []
    is_slow = (exposed > 0) & (best < took)
    pinned_ns = int(best[is_slow].sum()), int(modest[is_slow].sum())
    waiting = Fix(idle_cause=PAGEABLE_COPY)
    faster = replace(waiting, best_ns=pinned_ns[0], modest_ns=pinned_ns[1])
    return [
        Finding(
            rule="pageable_copies",
            claim=_claim(trace, copies, copies[is_slow], pinned_ns, lost_ns),
            confidence="high",
            effort="low",
            rows=tuple(copies[is_slow].tolist()),
            idle_rows=tuple(idle_rows.tolist()),
            details=idle_places(trace, idle_rows),
            fix=faster if is_slow.any() else waiting,
        )
    ]


def _moved(trace: Trace) -> Int64s:
    return trace.kernels["copied_bytes"].to_numpy(np.int64, na_value=0)


def _pinned_rates(trace: Trace) -> tuple[float, float]:
    """Return the highest and the lowest rate that copies from pinned memory may have here."""
    moved, took = _moved(trace), durations(trace)
    is_large = matches(trace.kernels["name"], PINNED) & (moved >= LARGE_BYTES) & (took > 0)
    if is_large.any():
        recorded = 1e9 * moved[is_large] / took[is_large]
        return float(recorded.max()), float(recorded.min())
    found = [_link_rate(gpu) for gpu in trace.gpus]
    rates = [rate for rate in found if rate is not None]
    if not rates or len(rates) < len(found):
        rates = [rate for _, rate in PINNED_BYTES_PER_S]
    return max(rates), SLOW_SHARE * min(rates)


def _link_rate(gpu: Gpu) -> float | None:
    """Return what a GPU's link does at best; None where its generation is unknown."""
    # AMD numbers its architectures in the same field.
    if gpu.compute_capability is None or "AMD" in gpu.name:
        return None
    capability = tuple(map(int, gpu.compute_capability.split(".")))
    return next(rate for first, rate in PINNED_BYTES_PER_S if capability >= first)


def _pinned_ns(moved: Int64s, took: Int64s, bytes_per_s: float) -> Int64s:
    """Return the time of copies from pinned memory; as long as now if small or of unknown size."""
    pinned = np.rint(1e9 * moved / bytes_per_s).astype(np.int64)
    return np.where(moved > LEAST_BYTES, np.minimum(pinned, took), took)


def _claim(
    trace: Trace, copies: Int64s, slow: Int64s, pinned_ns: tuple[int, int], lost_ns: int
) -> str:
    steps, took_ns = count_steps(trace), total_ns(trace, slow)
    moved = _moved(trace)[copies].sum()
    number = f"{len(copies) / steps:,.0f}"
    go = "copy{} in {} goes" if number == "1" else "copies{} in {} go"
    is_up = matches(trace.kernels["name"], PAGEABLE_UPLOAD)[copies]
    where = "from" if is_up.all() else "from or to" if is_up.any() else "to"
    size = f", {size_in_words(moved / steps)} in all," if moved else ""
    found = []
    if len(slow):
        low, high = (in_words(per_step(trace, ns)) for ns in pinned_ns)
        those = "" if len(slow) == len(copies) else " in those beside which nothing runs"
        took = in_words(per_step(trace, took_ns))
        found.append(f"{took}{those}, where pinned memory takes {low} to {high}")
    if lost_ns:
        found.append(f"{in_words(per_step(trace, lost_ns))} for which the GPU idles afterwards")
    share = f"{percent(share_of_whole(trace, took_ns + lost_ns))} of {whole_of(trace)}"
    return (
        f"{number} {go.format(size, whole_of(trace))} {where} memory that is not pinned, and the "
        f"host waits: {'; '.join(found)} ({f'together {share}' if len(found) > 1 else share})"
    )
