"""memory_fragmentation: steps ask the driver for memory, as the allocator has none that fits."""

from __future__ import annotations

from kprof.analyze.findings.claims import proof
from kprof.analyze.findings.patterns import in_pinned_memory, of_allocations
from kprof.analyze.findings.queries import idle_of, is_of_torch
from kprof.analyze.idle.causes import ALLOCATOR
from kprof.findings import Finding
from kprof.trace import Trace

SETTING = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def check(trace: Trace) -> list[Finding]:
    """Find idle time behind torch's requests for memory of the GPU; what it hides is silent."""
    if not is_of_torch(trace):
        return []
    idle_rows, _ = idle_of(trace, ALLOCATOR)
    idle_rows = idle_rows[~in_pinned_memory(trace, idle_rows)]
    command = proof(trace, "--env", SETTING)
    return of_allocations(trace, "memory_fragmentation", idle_rows, command)
