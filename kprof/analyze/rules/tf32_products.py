"""tf32_products: a model in float32 on a GPU that multiplies faster in bf16."""

from __future__ import annotations

import numpy as np

from kprof.analyze.claims import in_words, percent, proof_by_copy, work_places
from kprof.analyze.evidence import (
    durations,
    is_one_of,
    per_step,
    share_of_device,
    total_ns,
    whole_of,
    why_no_device,
)
from kprof.analyze.rules.math_attention import spelled_out
from kprof.analyze.trust.unanswered import why_no_ceilings
from kprof.finding import Finding, Remedy
from kprof.trace import Trace

NEEDS = (why_no_device, why_no_ceilings)

# Where products are a smaller part, what is gained does not pay for the care that it takes.
LEAST_SHARE = 0.1
# Of the peak, what large products and attention reach.
WELL = 0.7
# Under autocast some of these stay in float32, in a model of 16 bits none. An optimizer's weights
# stay as they are in both.
MOVING = ("elementwise", "norm", "softmax", "reduction", "copy", "loss", "indexing", "embedding")


def check(trace: Trace) -> list[Finding]:
    """Find products in TF32, and attention in float32, where the GPU is faster in bf16.

    Products of float32 that do without tensor cores are `fp32_products`.
    """
    kernels, device = trace.kernels, trace.meta.device
    if device is None or device.flops_per_s.get("bf16", 0) <= device.flops_per_s.get("tf32", 1e99):
        return []
    is_wide = is_one_of(kernels["dtype"], "fp32")
    is_product = is_one_of(kernels["kind"], "gemm", "convolution")
    is_product &= is_one_of(kernels["dtype"], "tf32")
    is_attention = is_one_of(kernels["kind"], "attention") & is_wide
    # Torch's fallback for attention computes in float32 what comes in 16 bits, and has a rule.
    is_model = ~np.isin(np.arange(len(kernels)), spelled_out(trace))
    multiplying = np.flatnonzero((is_product | is_attention) & is_model)
    share = share_of_device(trace, multiplying)
    if not (is_product & is_model).any() or share < LEAST_SHARE:
        return []
    moving = np.flatnonzero(is_one_of(kernels["kind"], *MOVING) & is_wide & is_model)
    took, moved_ns = total_ns(trace, multiplying), total_ns(trace, moving)
    best = _in_bf16_ns(trace, multiplying)
    faster = device.flops_per_s["bf16"] / device.flops_per_s["tf32"]
    beside = ""
    if moved_ns:
        beside = f", and {in_words(per_step(trace, moved_ns))} of passes in float32 would move half"
    claim = (
        f"Products in TF32 and attention in float32 take {in_words(per_step(trace, took))} of "
        f"{whole_of(trace)}, {percent(share)} of the device time; the {device.name} multiplies "
        f"{faster:.2g} times as fast in bf16, if the model's quality allows it{beside}"
    )
    return [
        Finding(
            rule="tf32_products",
            claim=claim,
            confidence="medium",
            effort="medium",
            rows=tuple(np.union1d(multiplying, moving).tolist()),
            details=work_places(trace, multiplying),
            remedy=Remedy(best + moved_ns // 2, (best + took) // 2 + moved_ns),
            command=proof_by_copy(trace, "bf16"),
        )
    ]


def _in_bf16_ns(trace: Trace, rows: np.ndarray) -> int:
    """Return what the rows take in bf16, at what large products reach, and at half the bytes."""
    device, took = trace.meta.device, durations(trace)[rows]
    assert device is not None
    flops, num_bytes = (
        trace.kernels[name].to_numpy(float, na_value=np.nan)[rows] for name in ("flops", "bytes")
    )
    rate = device.flops_per_s["bf16"]
    compute = flops / (WELL * rate) * 1e9
    compute = np.where(np.isnan(compute), took * device.flops_per_s["tf32"] / rate, compute)
    memory = np.nan_to_num(num_bytes) / 2 / device.memory_bytes_per_s * 1e9
    return int(np.minimum(np.maximum(compute, memory), took).sum())
