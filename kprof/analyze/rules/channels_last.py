"""channels_last: convolutions turn their tensors from one layout to the other and back."""

from __future__ import annotations

import numpy as np

from kprof.analyze.claims import in_words, percent, work_places
from kprof.analyze.evidence import (
    count_steps,
    is_one_of,
    matches,
    per_step,
    share_of_device,
    total_ns,
    whole_of,
)
from kprof.finding import Finding, Remedy
from kprof.trace import Trace

# cuDNN's and MIOpen's kernels that change a layout for a convolution, and change it back.
TURNING = r"(?i)nchwToNhwc|nhwcToNchw|nchw2nhwc|nhwc2nchw|batched_transpose|tensorTransformGeneric"
# One image that arrives as NCHW must be turned once; what is more than this is done in each layer.
LEAST_SHARE = 0.02


def check(trace: Trace) -> list[Finding]:
    """Find kernels that change layouts around convolutions; one for the input is silent."""
    kernels = trace.kernels
    convolutions = is_one_of(kernels["kind"], "convolution")
    rows = np.flatnonzero(matches(kernels["name"], TURNING))
    share = share_of_device(trace, rows)
    steps = count_steps(trace)
    if not convolutions.any() or len(rows) <= 2 * steps or share < LEAST_SHARE:
        return []
    claim = (
        f"{len(rows) / steps:,.0f} kernels of {whole_of(trace)} turn tensors between the layouts "
        f"NCHW and NHWC for {convolutions.sum() / steps:,.0f} of its convolutions: "
        f"{in_words(per_step(trace, total_ns(trace, rows)))}, {percent(share)} of the device time"
    )
    return [
        Finding(
            rule="channels_last",
            claim=claim,
            confidence="high",
            effort="low",
            rows=tuple(rows.tolist()),
            details=work_places(trace, rows),
            remedy=Remedy(best_ns=0, modest_ns=total_ns(trace, rows) // 2, launches=0),
        )
    ]
