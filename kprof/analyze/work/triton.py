"""Work of kernels written in Triton, mostly by Inductor, from the buffers they were given.

A recorded launch names its buffers without telling inputs from outputs: each is counted once,
which is right for all but those updated in place (they move twice). The computation of pointwise
and reducing kernels is not recorded, so their FLOPs are unknown. A handwritten kernel may touch
only parts of its buffers: at most all of them.
"""

from __future__ import annotations

import math
from itertools import pairwise

from kprof.analyze.work import Inputs, Model, Tensor, Work, multiply_add_flops
from kprof.analyze.work.gemm import product_work


def _generated(inputs: Inputs) -> Work | None:
    """Model a pointwise or reducing kernel."""
    buffers = inputs.tensors()
    if not buffers:
        return None
    most = _num_points(inputs, buffers)
    moved = sum(math.ceil(min(t.stored, most) * t.element_bytes) for t in buffers)
    return Work(None, moved)


def _num_points(inputs: Inputs, buffers: list[Tensor]) -> int:
    """Return an upper bound of the elements that a kernel reads of one buffer.

    A lookup is given a whole table but reads only as many elements as it has points. Those are
    the last one or two numbers among the arguments; a kernel's first or last buffer is of that
    size too where the numbers say less.
    """
    given = (inputs.value(i) for i in range(len(inputs.shapes)))
    numbers = [n for n in given if isinstance(n, int) and not isinstance(n, bool) and n > 0]
    points = math.prod(numbers[-2:]) if numbers else 0
    return max(points, buffers[0].numel, buffers[-1].numel)


def _generated_product(inputs: Inputs) -> Work | None:
    """Model a matrix product with what was fused to it: two neighbours that fit the last buffer."""
    buffers = inputs.tensors()
    for left, right in pairwise(buffers):
        work = product_work(left, right, 0)
        num_out = left.numel // max(left.shape[-1], 1) * right.shape[-1] if work else 0
        if work is not None and num_out == buffers[-1].numel:
            return Work(work.flops, sum(t.bytes for t in buffers), work.dtype)
    return None


def _generated_convolution(inputs: Inputs) -> Work | None:
    """Model a convolution with what was fused to it: its filter's outputs are channels of the last.

    A filter (out, in, height, width) meets every position of a result (batch, out, …).
    """
    buffers = inputs.tensors()
    if not buffers:
        return None
    out, moved = buffers[-1], sum(t.bytes for t in buffers)
    for x, weight in pairwise(buffers):
        is_filter = len(x.shape) == len(weight.shape) == len(out.shape) >= 3
        if is_filter and weight.shape[0] == out.shape[1] and x.shape[0] == out.shape[0]:
            flops = multiply_add_flops(x.dtype) * out.numel * math.prod(weight.shape[1:])
            return Work(flops, moved, x.dtype)
    return Work(None, moved)


def _whole_buffers(inputs: Inputs) -> Work | None:
    """Model a kernel that touches all of its buffers once, with unknown computation."""
    buffers = inputs.tensors()
    return Work(None, sum(t.bytes for t in buffers)) if buffers else None


def hand_written(inputs: Inputs) -> Work | None:
    """Model a kernel written by hand: it reads and writes at most all its arguments."""
    buffers = inputs.tensors()
    if not buffers:
        return None
    return Work(None, 2 * sum(t.bytes for t in buffers), bound="at most")


PREFIXES: dict[str, Model] = {
    "triton_poi_": _generated,
    "triton_red_": _generated,
    "triton_per_": _generated,
    "triton_tem_fused_mm": _generated_product,
    "triton_tem_fused_addmm": _generated_product,
    "triton_tem_fused_bmm": _generated_product,
    "triton_tem_fused_baddbmm": _generated_product,
    "triton_tem_fused__scaled_mm": _generated_product,
    "triton_tem_fused_convolution": _generated_convolution,
    "triton_tem_": _whole_buffers,
    "triton_flex_": _whole_buffers,
    "triton_mm": _generated_product,
    "triton_addmm": _generated_product,
    "triton_bmm": _generated_product,
    "triton_for_": _whole_buffers,
    "triton_spl_": _generated,
}
