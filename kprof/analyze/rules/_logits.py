"""Logits: the activities around the softmax of a loss over a large vocabulary."""

from __future__ import annotations

import numpy as np

from kprof.analyze.evidence import Int64s, elements_of, is_one_of
from kprof.analyze.neighbours import with_neighbours
from kprof.trace import Trace

ANCHORS = ("aten::_log_softmax", "aten::_log_softmax_backward_data")
LOSSES = ("aten::nll_loss*", "aten::cross_entropy*")
PARTS = ("aten::copy_", "aten::fill_", "aten::zero_", "aten::mul", "aten::div", *LOSSES, *ANCHORS)
# Casts, labels and the loss itself stand between.
REACH = (4, 4)
# Smaller ones stay in a cache and cost nothing worth naming.
LEAST_ELEMENTS = 4_000_000


def rows_of_logits(trace: Trace) -> tuple[Int64s, int, int]:
    """Return what passes over the logits of a loss, their number, and the elements of the largest.

    Empty where no loss follows the softmax, or the logits are few.
    """
    kernels = trace.kernels
    anchors = is_one_of(kernels["op"], *ANCHORS)
    nothing = np.zeros(0, dtype=np.int64)
    if not anchors.any() or not is_one_of(kernels["op"], *LOSSES).any():
        return nothing, 0, 0
    rows = with_neighbours(trace, anchors, is_one_of(kernels["op"], *PARTS), REACH).rows
    elements = elements_of(trace, rows)
    largest = int(elements[anchors[rows]].max(initial=0))
    if largest < LEAST_ELEMENTS:
        return nothing, 0, 0
    # Chunked losses have smaller parts: what is a tenth of the largest still is of the logits.
    is_logits = elements >= largest / 10
    is_loss = is_one_of(kernels["op"], *LOSSES)[rows]
    number = int((anchors[rows] & is_logits).sum())
    return np.sort(rows[is_logits | is_loss]), number, largest
