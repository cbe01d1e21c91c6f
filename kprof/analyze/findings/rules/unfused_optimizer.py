"""unfused_optimizer: the optimizer passes over all parameters once for each of its operations."""

from __future__ import annotations

import numpy as np

from kprof.analyze.findings.claims import clipped, in_words, percent, recommend
from kprof.analyze.findings.queries import (
    count_steps,
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

# Below this share of the device time and of the launches an optimizer is not what costs.
LEAST_SHARE = 0.02
LEAST_LAUNCHES = 0.2
# Accesses of each parameter, fused over unfused. Adam: 7 (read p, g, m, v; write p, m, v) over
# the 19 of lerp 3, mul 2, addcmul 4, sqrt 2, div 2, add 2, addcdiv 4. SGD with momentum: 5 over 8.
ADAM, OTHERS = 7 / 19, 5 / 8
# A fused launch takes some dozens of tensors.
TENSORS_AT_ONCE = 20


def check(trace: Trace) -> list[Finding]:
    """Find updates by `_foreach_` operators or parameter by parameter; fused ones are silent."""
    kernels = trace.kernels
    is_update = is_one_of(kernels["phase"], "optimizer") & ~is_one_of(kernels["kind"], "collective")
    is_update |= is_one_of(kernels["kind"], "optimizer")
    if is_one_of(kernels["op"], "aten::_fused_*")[is_update].any() or not is_update.any():
        return []
    if matches(kernels["name"], r"(?i)fused_?(adam|sgd|lamb)")[is_update].any():
        return []
    rows = np.flatnonzero(is_update & ~is_one_of(kernels["kind"], "set"))
    share = share_of_device(trace, rows)
    if share < LEAST_SHARE and len(rows) < LEAST_LAUNCHES * len(kernels):
        return []
    ops = kernels["op"].iloc[rows]
    is_adam = matches(ops, r"addcdiv").any()
    is_foreach = matches(ops, r"_foreach_").any()
    ratio = ADAM if is_adam else OTHERS
    took = total_ns(trace, rows)
    best = min(round(ratio * int(limits(trace)[rows].sum()) / 0.9), took)
    how = "with _foreach operators" if is_foreach else "parameter by parameter"
    steps, whole = count_steps(trace), whole_of(trace)
    claim = (
        f"The optimizer updates {how}: {counted(len(rows) / steps, 'launch', 'launches')} of "
        f"{whole}, {in_words(per_step(trace, took))}, {percent(share)} of the device time; a "
        "fused one passes over the parameters once"
    )
    kernel = recommend(trace, "adamw") if is_adam else None
    return [
        Finding(
            rule="unfused_optimizer",
            claim=claim,
            confidence="high",
            effort=kernel.effort if kernel else "low",
            rows=tuple(rows.tolist()),
            details=_operators(trace, rows),
            fix=Fix(
                best_ns=min(best, round(ratio * took)),
                modest_ns=round((1 + ratio) / 2 * took),
                launches=max(len(rows) // TENSORS_AT_ONCE, steps),
            ),
            swap=kernel.swap if kernel else None,
            dry_run=kernel.dry_run if kernel else "",
            command=kernel.command if kernel else "",
        )
    ]


def _operators(trace: Trace, rows: np.ndarray) -> tuple[str, ...]:
    kernels = trace.kernels.iloc[rows]
    sums = kernels["duration_ns"].groupby(kernels["op"].astype(str)).sum().nlargest(3)
    return tuple(
        f"{clipped(str(name))}: {in_words(per_step(trace, ns))}" for name, ns in sums.items()
    )
