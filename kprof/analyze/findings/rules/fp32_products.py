"""fp32_products: matrix products in float32 that run on the plain arithmetic units."""

from __future__ import annotations

import numpy as np

from kprof.analyze.capture_quality.unanswered import why_no_ceilings
from kprof.analyze.findings.claims import in_words, percent, proof, work_places
from kprof.analyze.findings.patterns import MODEST, in_type_ns
from kprof.analyze.findings.queries import (
    count_steps,
    is_one_of,
    per_step,
    share_of_device,
    total_ns,
    whole_of,
    why_no_device,
)
from kprof.errors import counted
from kprof.findings import Finding, Fix
from kprof.trace import Trace

NEEDS = (why_no_device, why_no_ceilings)

# Below this share of the device time a faster product saves less than a run varies.
LEAST_SHARE = 0.03
SETTING = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1"


def check(trace: Trace) -> list[Finding]:
    """Find products and convolutions of float32 where the GPU could use TF32; fp64 is silent."""
    kernels, device = trace.kernels, trace.meta.device
    if device is None or "tf32" not in device.flops_per_s:
        return []
    if device.flops_per_s["tf32"] <= device.flops_per_s.get("fp32", 0):
        return []
    rows = np.flatnonzero(
        is_one_of(kernels["kind"], "gemm", "convolution") & is_one_of(kernels["dtype"], "fp32")
    )
    share = share_of_device(trace, rows)
    if not len(rows) or share < LEAST_SHARE:
        return []
    faster = device.flops_per_s["tf32"] / device.flops_per_s.get("fp32", np.inf)
    times = f", whose tensor cores are {faster:.0f} times as fast in TF32" if faster > 1 else ""
    number = counted(len(rows) / count_steps(trace), "GEMM or convolution", "GEMMs or convolutions")
    claim = (
        f"Float32 is the type of {number} of {whole_of(trace)} "
        f"on the {device.name}{times}: {in_words(per_step(trace, total_ns(trace, rows)))}, "
        f"{percent(share)} of the device time"
    )
    best = in_type_ns(trace, rows, "fp32", "tf32")
    took = total_ns(trace, rows)
    is_conv = is_one_of(kernels["kind"], "convolution")[rows].all()
    return [
        Finding(
            rule="fp32_products",
            claim=claim,
            confidence="high",
            effort="low",
            rows=tuple(rows.tolist()),
            details=work_places(trace, rows),
            fix=Fix(best_ns=best, modest_ns=round(took - MODEST * (took - best))),
            # The variable is about products alone; convolutions have a switch in Python.
            command="" if is_conv else proof(trace, "--env", SETTING),
        )
    ]
