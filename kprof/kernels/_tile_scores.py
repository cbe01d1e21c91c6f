"""One step of the online softmax over scores still to be scaled, as products leave them."""

from __future__ import annotations

import triton
import triton.language as tl

from kprof.kernels._tile_softmax import shift_of


@triton.jit
def weigh_scores(score_MN, largest_M, total_M, scale) -> tl.tensor:
    """Do as `weigh` of `_tile_softmax` with scores to be multiplied by a scale above 0.

    Scaling and subtracting are one instruction then. For tiles of products, where few threads
    share a row: its total is added up in every step.
    """
    larger_M = tl.maximum(largest_M, tl.max(score_MN, axis=1))
    shift_M = shift_of(larger_M) * scale
    shrink_M = tl.exp2(largest_M * scale - shift_M)
    weight_MN = tl.exp2(score_MN * scale - shift_M[:, None])
    return weight_MN, shrink_M, larger_M, total_M * shrink_M + tl.sum(weight_MN, axis=1)
