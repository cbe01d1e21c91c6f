"""Work of operators that draw random numbers.

Drawing takes integer arithmetic, which no FLOP count covers.
"""

from __future__ import annotations

from kprof.analyze.work import Inputs, Model, Work, vector_dtype


def _draw(inputs: Inputs) -> Work | None:
    """Model filling a tensor."""
    target = inputs.tensor(0)
    if target is None:
        return None
    return Work(0, target.written_as(), written=target.written_as())


def _drop(inputs: Inputs) -> Work | None:
    """Model dropout: the result and a mask of one byte for each element are written."""
    x = inputs.tensor(0)
    if x is None:
        return None
    return Work(x.numel, x.bytes + x.written_as() + x.numel, vector_dtype(x.dtype))


def _drop_backward(inputs: Inputs) -> Work | None:
    """Model its backward: gradient and mask read, the input's gradient written."""
    grad, mask = inputs.tensor(0), inputs.tensor(1)
    if grad is None or mask is None:
        return None
    return Work(grad.numel, grad.bytes + mask.bytes + grad.written_as(), vector_dtype(grad.dtype))


_DRAWING = "bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_"


MODELS: dict[str, Model] = {
    **{f"aten::{name}": _draw for name in _DRAWING.split()},
    "aten::native_dropout": _drop,
    "aten::_fused_dropout": _drop,
    "aten::native_dropout_backward": _drop_backward,
    "aten::_masked_scale": _drop_backward,
}
