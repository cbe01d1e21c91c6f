"""logits_materialised: the logits of all tokens stand in memory at once, several times over."""

from __future__ import annotations

from kprof.analyze.findings.claims import percent, recommend, size_in_words
from kprof.analyze.findings.patterns import rows_of_logits
from kprof.analyze.findings.queries import is_one_of
from kprof.findings import Finding
from kprof.trace import Trace

# Some four copies are alive at once: a fortieth each is a tenth of the memory, and decides how
# large a batch can be. Where the memory's size is unknown, a gibibyte.
LEAST_PART = 1 / 40
LEAST_BYTES = 1 << 30
FLOAT_BYTES = 4


def check(trace: Trace) -> list[Finding]:
    """Find logits that take much of the memory in training; the claim is about memory."""
    rows, number, largest = rows_of_logits(trace)
    memory = trace.gpus[0].memory_bytes if trace.gpus else None
    if not number or largest * FLOAT_BYTES < (LEAST_PART * memory if memory else LEAST_BYTES):
        return []
    if not is_one_of(trace.kernels["phase"], "backward")[rows].any():
        return []
    one = largest * FLOAT_BYTES
    share = f", {percent(one / memory)} of the GPU's memory," if memory else ""
    claim = (
        f"One copy of the logits in float32 takes {size_in_words(one)}{share} and the loss makes "
        "several: the logits, their softmax and their gradient; computed in parts, beside the "
        "last layer, none of them needs to be whole"
    )
    kernel = recommend(trace, "linear_cross_entropy")
    return [
        Finding(
            rule="logits_materialised",
            claim=claim,
            confidence="high",
            effort=kernel.effort,
            rows=tuple(rows.tolist()),
            swap=kernel.swap,
            dry_run=kernel.dry_run,
            command=kernel.command,
        )
    ]
