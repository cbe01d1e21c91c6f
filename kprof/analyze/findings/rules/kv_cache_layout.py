"""kv_cache_layout: every new token copies the whole KV cache."""

from __future__ import annotations

import numpy as np

from kprof.analyze.capture_quality.unanswered import why_no_work
from kprof.analyze.findings.claims import (
    in_words,
    percent,
    proof_by_copy,
    size_in_words,
    work_places,
)
from kprof.analyze.findings.queries import (
    by_shapes,
    count_steps,
    durations,
    is_one_of,
    per_step,
    shape_of,
    share_of_device,
    total_ns,
    whole_of,
    why_no_device,
)
from kprof.analyze.whatif.changes import SHORTEST_KERNEL_NS
from kprof.errors import counted
from kprof.findings import Finding, Fix
from kprof.trace import Trace

NEEDS = (why_no_device, why_no_work)

# A few speculative tokens may be appended at once; a prompt is not appended to a cache.
MOST_NEW = 8
# Below this share of the device time copying is not what a token waits for.
LEAST_SHARE = 0.02


def check(trace: Trace) -> list[Finding]:
    """Find joins of a long tensor and a short one along a dimension that grows call by call."""
    kernels = trace.kernels
    joins = np.flatnonzero(is_one_of(kernels["op"], "aten::cat"))
    lengths, new = by_shapes(trace, joins, _appended, 2).T
    rows = joins[lengths > 0]
    share = share_of_device(trace, rows)
    if share < LEAST_SHARE or len(np.unique(lengths[lengths > 0])) < 2:
        return []
    moved = int(kernels["bytes"].to_numpy(np.int64, na_value=0)[rows].sum())
    steps = count_steps(trace)
    claim = (
        f"{counted(len(rows) / steps, 'time')} in {whole_of(trace)}, appending new keys or values "
        "copies "
        f"the whole cache of up to {lengths.max():,} tokens: "
        f"{size_in_words(moved / steps)} in {in_words(per_step(trace, total_ns(trace, rows)))}, "
        f"{percent(share)} of the device time"
    )
    return [
        Finding(
            rule="kv_cache_layout",
            claim=claim,
            confidence="high",
            effort="low",
            rows=tuple(rows.tolist()),
            details=work_places(trace, rows),
            fix=_fix(trace, rows, (new / np.maximum(lengths + new, 1))[lengths > 0]),
            command=proof_by_copy(trace, "static_cache"),
        )
    ]


def _appended(shapes: list[object]) -> list[int]:
    """Return how long a cache is that a join appends to, and by how much; 0 where it is none.

    Its length is the last dimension but one.
    """
    tensors = shapes[0] if shapes else None
    if not isinstance(tensors, list) or len(tensors) != 2:
        return [0, 0]
    old, new = map(shape_of, tensors)
    if len(old) != 4 or len(new) != 4:
        return [0, 0]
    is_appended = (*old[:2], old[3]) == (*new[:2], new[3]) and 0 < new[2] <= MOST_NEW < old[2]
    return [old[2], new[2]] if is_appended else [0, 0]


def _fix(trace: Trace, rows: np.ndarray, share_new: np.ndarray) -> Fix:
    """Return what writing the new tokens alone takes: nothing where another kernel does it.

    Attention, or what makes the new keys, can write them to their place. Modestly a kernel of its
    own does, for each join.
    """
    took = durations(trace)[rows]
    written = np.minimum(np.maximum(took * share_new, SHORTEST_KERNEL_NS), took)
    return Fix(best_ns=0, modest_ns=round(float(written.sum())), launches=0)
