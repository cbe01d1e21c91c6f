"""Work of factorizations, solvers, Fourier transforms, by their textbook counts.

Factorizations count the leading term. A Fourier transform of n complex elements counts
5 · n · log2(n) FLOPs by convention, half of it where one side is real.
"""

from __future__ import annotations

import math
from functools import partial

from kprof.analyze.element_type import COMPLEX, computed_in
from kprof.analyze.work import Inputs, Model, Work, multiply_add_flops, vector_dtype


def _factor(inputs: Inputs, thirds: int, num_written: int = 1) -> Work | None:
    """Model a square factorization of `thirds` / 3 · n³ multiply-adds."""
    a = inputs.tensor(0)
    if a is None or len(a.shape) < 2 or a.shape[-1] != a.shape[-2]:
        return None
    num_products = a.numel * a.shape[-1] * thirds // 3
    moved = a.bytes + num_written * a.written_as()
    return Work(multiply_add_flops(a.dtype) * num_products // 2, moved, computed_in(a.dtype))


def _solve(inputs: Inputs, matrix: int = 0, right: int = 1) -> Work | None:
    """Model solving a triangular system for some right sides: n² FLOPs each."""
    a, b = inputs.tensor(matrix), inputs.tensor(right)
    if a is None or b is None or len(a.shape) < 2 or len(b.shape) < 2:
        return None
    flops = multiply_add_flops(a.dtype) * b.numel * a.shape[-1] // 2
    return Work(flops, a.bytes // 2 + b.bytes + b.written_as(), computed_in(a.dtype))


def _orthogonalize(inputs: Inputs) -> Work | None:
    """Model a QR factorization of (m, n) matrices, m at least n: 2 · n² · (m - n / 3) FLOPs."""
    a = inputs.tensor(0)
    if a is None or len(a.shape) < 2:
        return None
    long, short = max(a.shape[-2:]), min(a.shape[-2:])
    each = 2 * short * short * (3 * long - short) // 3
    return Work(math.prod(a.shape[:-2]) * each, a.bytes + a.written_as(), computed_in(a.dtype))


def _distances(inputs: Inputs) -> Work | None:
    """Model the distances of all pairs of rows: 3 FLOPs for each element of each pair."""
    a, b = inputs.tensor(0), inputs.tensor(1)
    if a is None or b is None or len(a.shape) < 2 or len(b.shape) < 2:
        return None
    num_out = a.numel // max(a.shape[-1], 1) * b.shape[-2]
    moved = a.bytes + b.bytes + math.ceil(num_out * a.element_bytes)
    return Work(3 * num_out * a.shape[-1], moved, computed_in(a.dtype))


def _transform(inputs: Inputs, halves: str | None = None) -> Work | None:
    """Model a transform over some dimensions; `halves` names the side that is real.

    The complex side of a real one holds about half of the last transformed dimension.
    """
    x, dims = inputs.tensor(0), inputs.value(1)
    if x is None or not isinstance(dims, list) or not dims or not x.shape:
        return None
    shape = list(x.shape)
    last = dims[-1]
    if halves == "output":
        length = inputs.value(3)
        if not isinstance(length, int):
            return None
        shape[last] = length
    num_points = math.prod(shape)
    num_out = num_points
    if halves == "input" and inputs.value(3) is not False:
        num_out = num_points // max(shape[last], 1) * (shape[last] // 2 + 1)
    length = math.prod(shape[d] for d in dims)
    flops = 5 * num_points * math.log2(max(length, 2)) / (1 if halves is None else 2)
    part_bytes = x.element_bytes / (2 if x.dtype in COMPLEX else 1)
    each = part_bytes * (1 if halves == "output" else 2)
    return Work(int(flops), x.bytes + math.ceil(num_out * each), vector_dtype(x.dtype))


MODELS: dict[str, Model] = {
    "aten::linalg_cholesky_ex": partial(_factor, thirds=1),
    "aten::cholesky": partial(_factor, thirds=1),
    "aten::cholesky_inverse": partial(_factor, thirds=2),
    "aten::linalg_lu_factor_ex": partial(_factor, thirds=2),
    "aten::linalg_inv_ex": partial(_factor, thirds=6),
    "aten::linalg_solve_triangular": _solve,
    "aten::triangular_solve": partial(_solve, matrix=1, right=0),
    "aten::geqrf": _orthogonalize,
    "aten::linalg_qr": _orthogonalize,
    "aten::_cdist_forward": _distances,
    "aten::_fft_c2c": _transform,
    "aten::_fft_r2c": partial(_transform, halves="input"),
    "aten::_fft_c2r": partial(_transform, halves="output"),
}
