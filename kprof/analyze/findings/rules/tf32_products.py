"""tf32_products: a model in float32 on a GPU that multiplies faster in bf16."""

from __future__ import annotations

import numpy as np

from kprof.analyze.capture_quality.unanswered import why_no_ceilings
from kprof.analyze.findings.claims import in_words, percent, proof_by_copy, work_places
from kprof.analyze.findings.patterns import MODEST, in_type_ns
from kprof.analyze.findings.queries import (
    Bools,
    Int64s,
    is_one_of,
    per_step,
    share_of_device,
    total_ns,
    whole_of,
    why_no_device,
)
from kprof.analyze.findings.rules.math_attention import unfused_attention
from kprof.findings import Finding, Fix
from kprof.trace import Trace

NEEDS = (why_no_device, why_no_ceilings)

# Where products are a smaller part, what is gained does not pay for the care that it takes.
LEAST_SHARE = 0.1
# Passes that move half as much in a 16-bit model. An optimizer's weights stay as they are.
MOVING = ("elementwise", "norm", "softmax", "reduction", "copy", "loss", "indexing", "embedding")


def check(trace: Trace) -> list[Finding]:
    """Find products in TF32, and attention in float32, where the GPU is faster in bf16.

    Products of float32 that do without tensor cores are `fp32_products`, except on GPUs that are
    no faster in TF32.
    """
    kernels, device = trace.kernels, trace.meta.device
    rates = device.flops_per_s if device else {}
    if device is None or rates.get("bf16", 0) <= rates.get("tf32", 1e99):
        return []
    now = "tf32" if rates["tf32"] > rates.get("fp32", 0) else "fp32"
    is_wide = is_one_of(kernels["dtype"], "fp32")
    is_product = is_one_of(kernels["kind"], "gemm", "convolution")
    is_product &= is_one_of(kernels["dtype"], "tf32", now)
    is_attention = is_one_of(kernels["kind"], "attention") & is_wide
    # Torch's fallback for attention computes in float32 what comes in 16 bits, and has a rule.
    is_model = ~np.isin(np.arange(len(kernels)), unfused_attention(trace))
    multiplying = np.flatnonzero((is_product | is_attention) & is_model)
    share = share_of_device(trace, multiplying)
    if not (is_product & is_model).any() or share < LEAST_SHARE:
        return []
    took = total_ns(trace, multiplying)
    moving = _beside(trace, is_model & is_wide)
    moved = total_ns(trace, moving)
    beside = f"; {in_words(per_step(trace, moved))} of float32 memory passes would move half"
    best = in_type_ns(trace, multiplying, now, "bf16", bytes_share=1 / 2)
    faster = rates["bf16"] / rates[now]
    gemms = "GEMMs in TF32" if now == "tf32" else "GEMMs in float32"
    both = f"{gemms} and attention in float32" if is_attention.any() else gemms
    claim = (
        f"{both} take {in_words(per_step(trace, took))} of {whole_of(trace)}, {percent(share)} of "
        f"the device time; the {device.name} computes GEMMs {faster:.2g} times as fast in bf16, if "
        f"the model's quality allows it{beside if moved else ''}"
    )
    return [
        Finding(
            rule="tf32_products",
            claim=claim,
            confidence="medium",
            effort="medium",
            rows=tuple(np.union1d(multiplying, moving).tolist()),
            details=work_places(trace, multiplying),
            # Kernels that only move data take half at best; the modest case keeps float32.
            fix=Fix(best + moved // 2, round(took - MODEST * (took - best)) + moved),
            command=proof_by_copy(trace, "bf16"),
        )
    ]


def _beside(trace: Trace, is_wide: Bools) -> Int64s:
    """Return what else would move half as much, where most is multiplied in float32."""
    kernels = trace.kernels
    is_product = is_one_of(kernels["kind"], "gemm", "convolution")
    in_16_bits = np.flatnonzero(is_product & is_one_of(kernels["dtype"], "bf16", "fp16"))
    in_tf32 = np.flatnonzero(is_product & is_one_of(kernels["dtype"], "tf32", "fp32"))
    moving = (
        is_wide & is_one_of(kernels["kind"], *MOVING) & is_one_of(kernels["activity"], "kernel")
    )
    # Where most is in 16 bits, what is left in float32 has to be, as under autocast.
    if total_ns(trace, in_16_bits) > total_ns(trace, in_tf32):
        return np.zeros(0, dtype=np.int64)
    return np.flatnonzero(moving & ~is_one_of(kernels["phase"], "optimizer"))
