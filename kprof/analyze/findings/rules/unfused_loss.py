"""unfused_loss: the loss reads its logits repeatedly."""

from __future__ import annotations

from kprof.analyze.findings.claims import fused, in_words, percent
from kprof.analyze.findings.patterns import ANCHORS, finding_of, matter, rows_of_logits
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

HALF_BYTES = 2


def check(trace: Trace) -> list[Finding]:
    """Find cross-entropy made of casts, a softmax, a choice and their backward passes."""
    rows, _, _ = rows_of_logits(trace)
    if not len(rows) or not matter(trace, rows):
        return []
    is_softmax = is_one_of(trace.kernels["op"], *ANCHORS)[rows]
    elements = int(elements_of(trace, rows[is_softmax]).sum())
    # Read once forward, written once as the gradient; in 16 bits where they were cast from them.
    is_cast = is_one_of(trace.kernels["op"], "aten::copy_")[rows].any()
    item = HALF_BYTES if is_cast else 2 * HALF_BYTES
    steps, whole = count_steps(trace), whole_of(trace)
    claim = (
        f"The loss passes over its logits in "
        f"{counted(len(rows) / steps, 'launch', 'launches')} of {whole}: "
        f"{in_words(per_step(trace, total_ns(trace, rows)))}, "
        f"{percent(share_of_device(trace, rows))} of the device time; one read of the logits and "
        "one write of their gradient would do"
    )
    fix = fused(trace, rows, elements * item, int(is_softmax.sum()))
    return [finding_of(trace, "unfused_loss", claim, rows, fix, "cross_entropy")]
