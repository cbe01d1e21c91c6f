"""fp8_opportunity: large products in 16 bits on a GPU that multiplies twice as fast in 8."""

from __future__ import annotations

import numpy as np

from kprof.analyze.capture_quality.unanswered import why_no_ceilings, why_no_work
from kprof.analyze.findings.claims import in_words, percent, recommend, work_places
from kprof.analyze.findings.patterns import find_products
from kprof.analyze.findings.queries import (
    is_one_of,
    per_step,
    share_of_device,
    total_ns,
    whole_of,
    why_no_device,
)
from kprof.findings import Finding, Fix
from kprof.trace import Trace

NEEDS = (why_no_device, why_no_work, why_no_ceilings)

# Scaling and casting cost passes over the operands: only large products pay for them.
LEAST_SIZE = 2048
# Where products are a smaller part, what is gained does not pay for the care that it takes.
LEAST_SHARE = 0.3
# The peak is twice as high; casts and scales take part of that, at best a fifth of the time.
BEST, MODEST = 1 / 1.6, 1 / 1.1


def check(trace: Trace) -> list[Finding]:
    """Find large products in bf16 or fp16 that fill much of the device time."""
    kernels, device = trace.kernels, trace.meta.device
    if device is None or "fp8" not in device.flops_per_s:
        return []
    products = find_products(trace)
    is_large = np.minimum(np.minimum(products.m, products.n), products.k) >= LEAST_SIZE
    is_half = is_one_of(kernels["dtype"], "bf16", "fp16")[products.rows]
    is_bound = ~is_one_of(kernels["bound"], "memory")[products.rows]
    rows = products.rows[is_large & is_half & is_bound]
    share = share_of_device(trace, rows)
    if share < LEAST_SHARE:
        return []
    took = total_ns(trace, rows)
    faster = device.flops_per_s["fp8"] / device.flops_per_s.get("bf16", np.inf)
    claim = (
        f"16-bit GEMMs with M, N and K of at least {LEAST_SIZE:,} take "
        f"{in_words(per_step(trace, took))} of {whole_of(trace)}, {percent(share)} of the device "
        f"time; the {device.name} computes GEMMs {faster:.2g} times as fast in FP8, if the model's "
        "quality allows it"
    )
    kernel = recommend(trace, "fp8_linear", effort="high")
    return [
        Finding(
            rule="fp8_opportunity",
            claim=claim,
            confidence="low",
            effort="high",
            rows=tuple(rows.tolist()),
            details=work_places(trace, rows),
            fix=Fix(best_ns=round(BEST * took), modest_ns=round(MODEST * took)),
            # No `swap`, which would make it part of all swaps: quality has to allow it first.
            dry_run=kernel.dry_run,
            command=kernel.command,
        )
    ]
