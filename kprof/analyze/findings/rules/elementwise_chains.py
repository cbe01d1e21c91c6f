"""elementwise_chains: one operator after the other reads what the one before has just written."""

from __future__ import annotations

import numpy as np

from kprof.analyze.capture_quality.unanswered import why_no_work
from kprof.analyze.findings.claims import (
    WELL_USED,
    in_words,
    memory_ns,
    percent,
    proof_by_copy,
    work_places,
)
from kprof.analyze.findings.patterns import launch_order
from kprof.analyze.findings.queries import (
    count_steps,
    durations,
    elements_of,
    is_one_of,
    matches,
    per_step,
    share_of_device,
    total_ns,
    whole_of,
    why_no_device,
)
from kprof.errors import counted
from kprof.findings import Finding, Fix
from kprof.trace import Trace

NEEDS = (why_no_device, why_no_work)
# It does not see what more particular rules explain.
IS_GENERAL = True

KINDS = ("elementwise", "copy", "reduction", "softmax", "random", "set")
# Shorter ones are bound by their latency; a rule of their own is about them.
LEAST_NS = 5_000
# A compiler joins what is worth a tenth of the device time, and costs more trouble than less.
LEAST_SHARE = 0.1
COMPILED = r"^triton_"


def check(trace: Trace) -> list[Finding]:
    """Find runs of operators that a compiler would join into one pass; compiled runs are silent."""
    kernels = trace.kernels
    if matches(kernels["name"], COMPILED).any():
        return []
    took = durations(trace)
    is_simple = is_one_of(kernels["activity"], "kernel") & is_one_of(kernels["kind"], *KINDS)
    is_simple = is_simple & (took >= LEAST_NS) & kernels["bytes"].notna().to_numpy(bool)
    if share_of_device(trace, is_simple) < LEAST_SHARE:
        return []
    rows, first = _chains(trace, is_simple)
    if share_of_device(trace, rows) < LEAST_SHARE:
        return []
    num_bytes = kernels["bytes"].to_numpy(np.int64, na_value=0)[rows]
    # The largest traffic in a chain is about that of one fused pass.
    least = int(np.maximum.reduceat(num_bytes, first).sum())
    spent, best = total_ns(trace, rows), memory_ns(trace, least / WELL_USED)
    if best is None:
        # No ceiling is known: a fused pass is as fast as the fastest of these; small tensors may
        # have been in the cache.
        is_large = num_bytes >= np.median(num_bytes)
        best = round(least / float((num_bytes / took[rows])[is_large].max()))
    claim = (
        f"{len(rows) / count_steps(trace):,.0f} elementwise operators of {whole_of(trace)} form "
        f"{counted(len(first) / count_steps(trace), 'chain')} over tensors of one size, and each "
        "operator is a pass over memory: "
        f"{in_words(per_step(trace, spent))}, {percent(share_of_device(trace, rows))} of "
        "the device time"
    )
    return [
        Finding(
            rule="elementwise_chains",
            claim=claim,
            confidence="medium",
            effort="medium",
            rows=tuple(np.sort(rows).tolist()),
            details=work_places(trace, rows),
            fix=Fix(
                best_ns=min(best, spent),
                modest_ns=min((best + spent) // 2, spent),
                launches=len(first),
            ),
            command=proof_by_copy(trace, "compiled"),
        )
    ]


def _chains(trace: Trace, is_simple: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of runs of two and more in their order, and where among them each begins."""
    order = launch_order(trace)
    phase, stream = (
        trace.kernels["phase"].cat.codes.to_numpy()[order],
        trace.kernels["stream"].to_numpy()[order],
    )
    simple = is_simple[order]
    joins = np.zeros(len(order), dtype=bool)
    joins[1:] = simple[1:] & simple[:-1]
    joins[1:] &= (phase[1:] == phase[:-1]) & (stream[1:] == stream[:-1])
    # Only tensors of one size can be handed on within a pass.
    size = np.zeros(len(order), dtype=np.int64)
    size[simple] = elements_of(trace, order[simple])
    joins[1:] &= (size[1:] == size[:-1]) & (size[1:] > 0)
    number = np.cumsum(~joins)
    in_chain = simple & (np.bincount(number)[number] > 1)
    first = np.flatnonzero(np.diff(number[in_chain], prepend=-1) != 0)
    return order[in_chain], first
