"""channels_last: convolutions convert their tensors between two layouts."""

from __future__ import annotations

import numpy as np

from kprof.analyze.findings.claims import in_words, percent, work_places
from kprof.analyze.findings.queries import (
    Int64s,
    count_steps,
    durations,
    is_one_of,
    limits,
    matches,
    per_step,
    share_of_device,
    total_ns,
    whole_of,
)
from kprof.errors import counted
from kprof.findings import Finding, Fix
from kprof.trace import Trace

# cuDNN's and MIOpen's kernels that change a layout for a convolution, and change it back.
TURNING = r"(?i)nchwToNhwc|nhwcToNchw|nchw2nhwc|nhwc2nchw|batched_transpose|tensorTransformGeneric"
# One image that arrives as NCHW must be turned once; what is more than this is done in each layer.
LEAST_SHARE = 0.02
# Torch has other kernels of these for tensors in NHWC, as long as each channel's values lie apart.
BY_LAYOUT = r"batch_norm|group_norm|pool2d|upsample"
# Share of the memory's bandwidth that they reach there at best.
WELL_USED = 0.9


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
        f"{len(rows) / steps:,.0f} kernels of {whole_of(trace)} convert tensors between layouts "
        f"NCHW and NHWC for {convolutions.sum() / steps:,.0f} of its convolutions: "
        f"{in_words(per_step(trace, total_ns(trace, rows)))}, {percent(share)} of the device time"
    )
    laid = np.flatnonzero(
        matches(kernels["op"], BY_LAYOUT) & ~np.isin(np.arange(len(kernels)), rows)
    )
    places = work_places(trace, rows)
    if len(laid):
        took = in_words(per_step(trace, total_ns(trace, laid)))
        places = (
            *places,
            f"{counted(len(laid) / steps, 'kernel')} of norms and pools in NCHW: {took}",
        )
    return [
        Finding(
            rule="channels_last",
            claim=claim,
            confidence="high",
            effort="low",
            rows=tuple(np.union1d(rows, laid).tolist()),
            details=places,
            fix=_fix(trace, rows, laid),
        )
    ]


def _fix(trace: Trace, turning: Int64s, laid: Int64s) -> Fix:
    """Return what is left: no turning, and what has kernels for either layout at its least traffic.

    Modestly half of the turning is left, and the others take as long as now. Which launches go, a
    fix of both cannot say: then all stay.
    """
    took = durations(trace)[laid]
    least = int(np.minimum(limits(trace)[laid] / WELL_USED, took).sum())
    modest_ns = total_ns(trace, turning) // 2 + int(took.sum())
    return Fix(best_ns=least, modest_ns=modest_ns, launches=None if len(laid) else 0)
