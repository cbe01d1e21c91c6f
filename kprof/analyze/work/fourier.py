"""Work of Fourier transforms.

By convention 5 · n · log2(n) FLOPs for n complex elements, half of it where one side is real.
"""

from __future__ import annotations

import math
from functools import partial

from kprof.analyze.element_type import COMPLEX
from kprof.analyze.work import Inputs, Model, Work, vector_dtype


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
    "aten::_fft_c2c": _transform,
    "aten::_fft_r2c": partial(_transform, halves="input"),
    "aten::_fft_c2r": partial(_transform, halves="output"),
}
