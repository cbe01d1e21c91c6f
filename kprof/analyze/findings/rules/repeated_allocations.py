"""repeated_allocations: pinned memory, or any outside torch, is allocated again and again."""

from __future__ import annotations

from kprof.analyze.findings.patterns import in_pinned_memory, of_allocations
from kprof.analyze.findings.queries import idle_of, is_of_torch
from kprof.analyze.idle.causes import ALLOCATOR
from kprof.findings import Finding
from kprof.trace import Trace


def check(trace: Trace) -> list[Finding]:
    """Find idle time behind allocations that no setting of torch's allocator for GPUs avoids."""
    idle_rows, _ = idle_of(trace, ALLOCATOR)
    if is_of_torch(trace):
        idle_rows = idle_rows[in_pinned_memory(trace, idle_rows)]
    return of_allocations(trace, "repeated_allocations", idle_rows)
