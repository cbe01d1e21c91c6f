"""unfused_rope: rotary position embedding runs unfused on every query and key."""

from __future__ import annotations

import numpy as np

from kprof.analyze.findings.claims import fused, in_words, item_size, percent
from kprof.analyze.findings.patterns import finding_of, matter, with_neighbours
from kprof.analyze.findings.queries import (
    count_steps,
    elements_of,
    is_one_of,
    per_step,
    share_of_device,
    total_ns,
    whole_of,
)
from kprof.errors import counted
from kprof.findings import Finding
from kprof.trace import Trace

FORWARD_PARTS = ("aten::mul", "aten::neg", "aten::cat", "aten::add")
BACKWARD_PARTS = (
    "aten::mul",
    "aten::neg",
    "aten::fill_",
    "aten::zero_",
    "aten::copy_",
    "aten::add*",
)
# Around the negated half: the product with the cosine, joining, that with the sine, the sum.
REACH = (1, 3)
# Backward the halves are copied into zeros, and the gradients added.
REACH_BACKWARD = (1, 7)
# The half is read and written with the other half: four times its size.
TIMES_HALF = 4


def check(trace: Trace) -> list[Finding]:
    """Find halves of tensors that are negated and joined again, between two products."""
    kernels = trace.kernels
    negated = is_one_of(kernels["op"], "aten::neg")
    if not negated.any():
        return []
    is_backward = is_one_of(kernels["phase"], "backward")
    is_joined, is_product = (is_one_of(kernels["op"], op) for op in ("aten::cat", "aten::mul"))
    parts = is_one_of(kernels["op"], *FORWARD_PARTS)
    forward = with_neighbours(trace, negated & ~is_backward, parts, REACH)
    forward = forward.take(forward.have(is_joined) & forward.have(is_product))
    if not forward.number:
        return []
    parts = is_one_of(kernels["op"], *BACKWARD_PARTS)
    modules = kernels["module"].cat.codes.to_numpy()
    is_near = np.isin(modules, np.unique(modules[forward.rows]))
    backward = with_neighbours(trace, negated & is_backward & is_near, parts, REACH_BACKWARD)
    rows = np.sort(np.concatenate([forward.rows, backward.rows]))
    if not matter(trace, rows):
        return []
    halves = rows[negated[rows]]
    num_bytes = TIMES_HALF * int(elements_of(trace, halves).sum()) * item_size(trace, rows)
    number = forward.number + backward.number
    claim = (
        f"Rotary position embedding runs unfused {counted(number / count_steps(trace), 'time')} in "
        f"{whole_of(trace)}, as {counted(len(rows) / count_steps(trace), 'launch', 'launches')}: "
        f"{in_words(per_step(trace, total_ns(trace, rows)))}, "
        f"{percent(share_of_device(trace, rows))} of the device time"
    )
    # Queries and keys are turned in one launch.
    fix = fused(trace, rows, num_bytes, (number + 1) // 2)
    return [finding_of(trace, "unfused_rope", claim, rows, fix, "rope")]
