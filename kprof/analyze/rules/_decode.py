"""Decoding: whether a recording is of a model that makes one token after another."""

from __future__ import annotations

import math

import numpy as np

from kprof.analyze.evidence import Bools, by_shapes, is_one_of, shape_of
from kprof.trace import Trace

# A batch of more sequences than this keeps tensor cores busy, and a host has time to launch.
MOST_ROWS = 64
LEAST_SHARE = 0.5
FEW = 8


def is_decoding(trace: Trace) -> bool:
    """Tell whether most products are of a few rows, with no backward pass."""
    kernels = trace.kernels
    if is_one_of(kernels["phase"], "backward", "optimizer").any():
        return False
    products = np.flatnonzero(is_one_of(kernels["op"], "aten::mm", "aten::addmm", "aten::linear"))
    if len(products) < FEW:
        return False
    return bool(_is_thin(trace, products).mean() >= LEAST_SHARE)


def _is_thin(trace: Trace, products: np.ndarray) -> Bools:
    """Tell which products have few rows on their left side."""
    rows = by_shapes(trace, products, lambda shapes: [rows_of_product(shapes)], 1)[:, 0]
    return np.asarray((rows > 0) & (rows <= MOST_ROWS))


def rows_of_product(shapes: list[object]) -> int:
    """Return the rows of a product's left side from the shapes of its inputs; 0 where unknown."""
    matrices = [shape for shape in map(shape_of, shapes) if len(shape) >= 2]
    # Of addmm the bias may come first as a matrix; the two that are multiplied come last.
    return math.prod(matrices[-2][:-1]) if len(matrices) >= 2 else 0
