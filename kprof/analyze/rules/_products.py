"""Products: the sizes of matrix products, as their operators' shapes tell them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kprof.analyze.evidence import Bools, Int64s, by_shapes, durations, is_one_of, shape_of
from kprof.trace import Trace

# Of the peak of tensor cores, what large products and attention reach.
WELL = 0.7
OPERATORS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm")


@dataclass(frozen=True)
class Products:
    """Rows of `kernels` that multiply matrices of known sizes: (batch of) M x K times K x N."""

    rows: Int64s
    batch: Int64s
    m: Int64s
    n: Int64s
    k: Int64s
    is_transposed: Bools
    """Whether the left matrix lies in memory by columns: its rows there have M elements."""


def find_products(trace: Trace) -> Products:
    """Return the products whose sizes were recorded; what else operators launch is left out."""
    kernels = trace.kernels
    is_product = is_one_of(kernels["kind"], "gemm") & is_one_of(kernels["op"], *OPERATORS)
    rows = np.flatnonzero(is_product)
    sizes = by_shapes(trace, rows, _sizes, 4)
    known = sizes.all(axis=1)
    strides = by_shapes(trace, rows[known], _left_strides, 2, column="input_strides")
    is_transposed = (strides[:, 0] == 1) & (strides[:, 1] > 1)
    batch, m, n, k = sizes[known].T
    return Products(rows[known], batch, m, n, k, is_transposed)


def in_type_ns(trace: Trace, rows: Int64s, now: str, then: str, *, bytes_share: float = 1) -> int:
    """Return how long rows of type `now` take in type `then`, but for what memory takes, in ns.

    `bytes_share`: of the bytes that they move now. What has no known work takes as much less as
    the peak of `then` is higher.
    """
    device, took = trace.meta.device, durations(trace)[rows]
    assert device is not None
    flops, num_bytes = (
        trace.kernels[name].to_numpy(float, na_value=np.nan)[rows] for name in ("flops", "bytes")
    )
    rate = device.flops_per_s[then]
    compute = flops / (WELL * rate) * 1e9
    compute = np.where(~(flops > 0), took * device.flops_per_s.get(now, rate) / rate, compute)
    memory = np.nan_to_num(num_bytes) * bytes_share / device.memory_bytes_per_s * 1e9
    return int(np.minimum(np.maximum(compute, memory), took).sum())


def _left_strides(strides: list[object]) -> tuple[int, int]:
    """Return the last two strides of the left matrix; zeros where they do not tell."""
    matrices = [stride for stride in map(shape_of, strides) if len(stride) in (2, 3)]
    # Before the two factors addmm has its bias; behind them a scaled product has its scales.
    if len(matrices) not in (2, 3):
        return 0, 0
    return matrices[-2][-2], matrices[-2][-1]


def _sizes(shapes: list[object]) -> tuple[int, int, int, int]:
    """Return batch, M, N and K; zeros where the shapes do not tell."""
    matrices = [shape for shape in map(shape_of, shapes) if len(shape) in (2, 3)]
    # Of addmm the bias may come first as a matrix; of a scaled product scales come last.
    pairs = [(a, b) for a, b in pairwise(matrices) if a[-1] == b[-2]]
    if not pairs:
        return 0, 0, 0, 0
    left, right = pairs[-1]
    return math.prod(left[:-2]), left[-2], right[-1], left[-1]
