"""low_occupancy: long kernels with so few blocks that most SMs have nothing to do."""

from __future__ import annotations

import numpy as np

from kprof.analyze.findings.claims import clipped, in_words, percent
from kprof.analyze.findings.queries import (
    durations,
    is_one_of,
    limits,
    per_step,
    share_of_device,
    sizes_of,
    total_ns,
    whole_of,
)
from kprof.analyze.groupings import collapse_layers, number_rows
from kprof.findings import Finding, Fix
from kprof.trace import Trace

# Kernels that live on every SM have as many blocks as there are; half of them is few by mistake.
FEW = 0.5
# Shorter kernels end before more blocks would matter.
LEAST_NS = 10_000
# Below this share of the device time no launch shape is worth changing.
LEAST_SHARE = 0.03


def check(trace: Trace) -> list[Finding]:
    """Find long kernels that launch fewer blocks than half of the SMs; collectives are meant so."""
    kernels = trace.kernels
    gpu = trace.gpus[0] if trace.gpus else None
    num_sms = (gpu and gpu.num_sms) or (trace.meta.device and trace.meta.device.num_sms)
    if not num_sms:
        return []
    blocks = sizes_of(kernels["grid"])
    took = durations(trace)
    few = (blocks > 0) & (blocks < FEW * num_sms) & (took >= LEAST_NS)
    few &= ~is_one_of(kernels["kind"], "collective") & ~_is_overlapped(trace)
    rows = np.flatnonzero(few)
    share = share_of_device(trace, rows)
    if share < LEAST_SHARE:
        return []
    spent = total_ns(trace, rows)
    used = float((blocks[rows] * took[rows]).sum() / max(spent, 1) / num_sms)
    claim = (
        f"Kernels of {in_words(LEAST_NS)} and more that launch fewer blocks than half of the "
        f"{num_sms} SMs take {in_words(per_step(trace, spent))} of {whole_of(trace)}, "
        f"{percent(share)} of the device time, and use {percent(used)} of the SMs"
    )
    filled = np.maximum(limits(trace)[rows] * (kernels["limit_ns"].notna().to_numpy()[rows]), 0)
    best = int(np.maximum(np.maximum(filled, took[rows] * blocks[rows] / num_sms), 860).sum())
    return [
        Finding(
            rule="low_occupancy",
            claim=claim,
            confidence="medium",
            effort="high",
            rows=tuple(rows.tolist()),
            details=_places(trace, rows, blocks),
            fix=Fix(best_ns=min(best, spent), modest_ns=min((best + spent) // 2, spent)),
        )
    ]


def _is_overlapped(trace: Trace) -> np.ndarray:
    """Tell which kernels ran beside another of their device; copies leave it its SMs."""
    kernels = trace.kernels
    start, took = kernels["start_ns"].to_numpy(np.int64), durations(trace)
    device = number_rows(kernels, ["rank", "device"])
    order = np.lexsort([start, device])
    result = np.zeros(len(order), dtype=bool)
    uses_sms = ~is_one_of(kernels["activity"], "memcpy", "memset")
    for one in np.unique(device):
        mine = order[(device[order] == one) & uses_sms[order]]
        until = np.maximum.accumulate(start[mine] + took[mine])
        late = np.flatnonzero(start[mine][1:] < until[:-1]) + 1
        result[mine[late]] = result[mine[late - 1]] = True
    return result


def _places(trace: Trace, rows: np.ndarray, blocks: np.ndarray) -> tuple[str, ...]:
    kernels = trace.kernels.iloc[rows].assign(blocks=blocks[rows])
    named = (
        kernels["op"].astype(object).where(kernels["op"].notna(), kernels["name"].astype(object))
    )
    modules = collapse_layers(kernels["module"]).astype(object).fillna("")
    groups = kernels.groupby([named, modules], sort=False)
    sums = groups.agg(ns=("duration_ns", "sum"), blocks=("blocks", "median")).nlargest(3, "ns")
    return tuple(
        f"{clipped(' in '.join(filter(None, map(str, where))))}: {in_words(per_step(trace, ns))}, "
        f"{number:,.0f} {'block' if number == 1 else 'blocks'} in the median"
        for where, ns, number in zip(sums.index, sums["ns"], sums["blocks"], strict=True)
    )
