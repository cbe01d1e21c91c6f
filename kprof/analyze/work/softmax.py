"""Work of softmax, also of its logarithm.

FLOPs per element, by convention: 5 forward (maximum, difference, exponential, sum, quotient) and
4 backward.
"""

from __future__ import annotations

from functools import partial

from kprof.analyze.element_type import NUMBERED
from kprof.analyze.work import Inputs, Model, Work, vector_dtype


def _forward(inputs: Inputs) -> Work | None:
    """Model one read and one write of every element; `half_to_float` writes fp32."""
    x = inputs.tensor(0)
    if x is None:
        return None
    dtype = "fp32" if inputs.value(2) is True else x.dtype
    return Work(5 * x.numel, x.bytes + x.written_as(dtype), vector_dtype(x.dtype))


def _masked(inputs: Inputs, mask: int) -> Work | None:
    """Model a softmax that also reads a mask."""
    x, hidden = inputs.tensor(0), inputs.tensor(mask)
    if x is None or hidden is None:
        return None
    return Work(5 * x.numel, x.bytes + hidden.bytes + x.written_as(), vector_dtype(x.dtype))


def _backward(inputs: Inputs) -> Work | None:
    """Model reading gradient and result, and writing the input's gradient in the input's type."""
    grad, out = inputs.tensor(0), inputs.tensor(1)
    if grad is None or out is None:
        return None
    number = inputs.value(3)
    dtype = NUMBERED.get(number, grad.dtype) if isinstance(number, int) else grad.dtype
    return Work(4 * grad.numel, grad.bytes + out.bytes + grad.written_as(dtype), "fp32")


def _masked_backward(inputs: Inputs) -> Work | None:
    """Model the same where a mask is read, too."""
    grad, out, mask = (inputs.tensor(i) for i in range(3))
    if grad is None or out is None or mask is None:
        return None
    moved = grad.bytes + out.bytes + mask.bytes + grad.written_as()
    return Work(4 * grad.numel, moved, vector_dtype(grad.dtype))


MODELS: dict[str, Model] = {
    "aten::_softmax": _forward,
    "aten::_log_softmax": _forward,
    "aten::_safe_softmax": _forward,
    "aten::_masked_softmax": partial(_masked, mask=1),
    "aten::_softmax_backward_data": _backward,
    "aten::_masked_softmax_backward": _masked_backward,
    "aten::_log_softmax_backward_data": _backward,
}
