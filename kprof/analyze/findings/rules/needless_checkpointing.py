"""needless_checkpointing: the forward pass is recomputed although memory is free."""

from __future__ import annotations

import numpy as np

from kprof.analyze.capture_quality.unanswered import Unanswered
from kprof.analyze.findings.claims import in_words, percent, size_in_words, work_places
from kprof.analyze.findings.queries import (
    per_step,
    share_of_device,
    total_ns,
    whole_of,
    why_no_device,
)
from kprof.findings import Finding, Fix
from kprof.trace import Trace

# Below this share of the device time, storing everything would not be felt.
LEAST_SHARE = 0.05
# With less than this free, storing activations of some layers would soon run out of memory.
LEAST_FREE = 0.4


def why_no_peak(trace: Trace) -> Unanswered | None:
    """Return why free memory is unknown; None where it is known."""
    if peak_bytes(trace) and trace.gpus and trace.gpus[0].memory_bytes:
        return None
    return Unanswered(
        "How much memory is free?",
        "the GPU's memory use was not sampled",
        "record with `kprof run`, which samples the GPU through NVML, or with --memory",
    )


NEEDS = (why_no_device, why_no_peak)


def peak_bytes(trace: Trace) -> float:
    """Return the most memory that any sample shows; 0 where none does."""
    samples = trace.samples
    wanted = samples["quantity"].isin(["memory_used_bytes", "reserved_bytes"]).to_numpy(bool)
    return float(samples["value"].to_numpy(float)[wanted].max(initial=0.0))


def check(trace: Trace) -> list[Finding]:
    """Find recomputation where much memory was free; where memory is full it is needed."""
    rows = np.flatnonzero(trace.kernels["recomputed"].to_numpy(bool))
    share = share_of_device(trace, rows)
    memory = float(trace.gpus[0].memory_bytes or 0)
    free = 1 - peak_bytes(trace) / max(memory, 1.0)
    if share < LEAST_SHARE or free < LEAST_FREE:
        return []
    claim = (
        f"Checkpointing computes {in_words(per_step(trace, total_ns(trace, rows)))} of "
        f"{whole_of(trace)} a second time, {percent(share)} of the device time, while "
        f"{size_in_words(free * memory)} of the GPU's {size_in_words(memory)} stay free"
    )
    return [
        Finding(
            rule="needless_checkpointing",
            claim=claim,
            confidence="medium",
            effort="low",
            rows=tuple(rows.tolist()),
            details=work_places(trace, rows),
            fix=Fix(best_ns=0, modest_ns=total_ns(trace, rows) // 2, launches=0),
        )
    ]
