"""Work of softmax and log-softmax.

FLOPs per element, by convention: 5 forward (maximum, difference, exponential, sum, quotient) and
4 backward.
"""

from __future__ import annotations

from functools import partial

from kprof.analyze.work import Inputs, Model, Work, vector_dtype

# PyTorch's numbers for element types, as `input_dtype` is recorded.
_TYPE_BY_NUMBER = {5: "fp16", 6: "fp32", 7: "fp64", 15: "bf16"}


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
    dtype = _TYPE_BY_NUMBER.get(number, grad.dtype) if isinstance(number, int) else grad.dtype
    return Work(4 * grad.numel, grad.bytes + out.bytes + grad.written_as(dtype), "fp32")


MODELS: dict[str, Model] = {
    "aten::_softmax": _forward,
    "aten::_log_softmax": _forward,
    "aten::_safe_softmax": _forward,
    "aten::_masked_softmax": partial(_masked, mask=1),
    "aten::_softmax_backward_data": _backward,
    "aten::_log_softmax_backward_data": _backward,
}
