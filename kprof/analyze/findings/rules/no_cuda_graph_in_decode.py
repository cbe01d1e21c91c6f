"""no_cuda_graph_in_decode: the host launches every kernel of a decode step by itself."""

from __future__ import annotations

from kprof.analyze.capture_quality.unanswered import why_no_timeline, why_no_work
from kprof.analyze.findings.claims import (
    idle_places,
    in_words,
    percent,
    proof_by_copy,
    recommend,
)
from kprof.analyze.findings.one_offs import SILENCE_NS
from kprof.analyze.findings.patterns import is_decoding
from kprof.analyze.findings.queries import (
    count_host_steps,
    idle_of,
    per_step,
    share_of_whole,
    whole_of,
    why_no_device,
)
from kprof.analyze.idle.causes import LAUNCH_BOUND
from kprof.findings import Finding, Fix
from kprof.trace import Trace

NEEDS = (why_no_device, why_no_timeline, why_no_work)

# The recorder adds a few percent of a step to the host's time, never this much.
LEAST_SHARE = 0.15


def check(trace: Trace) -> list[Finding]:
    """Find decoding whose time is the host's, launching kernel by kernel."""
    idle_rows, lost_ns = idle_of(trace, LAUNCH_BOUND, most_ns=SILENCE_NS)
    share = share_of_whole(trace, lost_ns)
    if share < LEAST_SHARE or not is_decoding(trace):
        return []
    number = (trace.kernels["activity"] == "kernel").sum() / count_host_steps(trace)
    claim = (
        f"Decoding leaves the GPU idle for {in_words(per_step(trace, lost_ns))} of "
        f"{whole_of(trace)} ({percent(share)} of it), while the host launches "
        f"{number:,.0f} kernels one by one; a CUDA graph replays those of a token with one launch"
    )
    kernel = recommend(trace, "decode")
    # Whether the model is one that the kernel decodes, only its process can tell.
    is_known = trace.meta.dry_run is not None and any(
        row.kernel == "decode" for row in trace.meta.dry_run.rows
    )
    has_kernel = is_known and kernel.swap is not None
    return [
        Finding(
            rule="no_cuda_graph_in_decode",
            claim=claim,
            confidence="high",
            effort=kernel.effort if has_kernel else "medium",
            idle_rows=tuple(idle_rows.tolist()),
            details=idle_places(trace, idle_rows),
            fix=Fix(graphs=True),
            swap=kernel.swap if has_kernel else None,
            dry_run=kernel.dry_run if is_known else "",
            command=kernel.command if has_kernel else proof_by_copy(trace, "static_cache"),
        )
    ]
