"""Work of optimizers that update all parameters in one operator.

Where recorders leave the shapes out (they do so for long lists), the launches still bound the work:
`kprof.analyze.roofline.launch_work`.
"""

from __future__ import annotations

from functools import partial

from kprof.analyze.work import Inputs, Model, Work
from kprof.analyze.work.elementwise import foreach_work

# FLOPs of one parameter, counted from the update rules as published; a root counts 1.
ADAM_FLOPS = 14
SGD_FLOPS = 6
ADAGRAD_FLOPS = 6


def _adam(inputs: Inputs) -> Work | None:
    """Model Adam and AdamW: parameter, gradient and two moments read, all but the gradient written.

    AMSGrad keeps a third moment.
    """
    num_moments = 3 if inputs.list_shapes(4) else 2
    return foreach_work(inputs, 2 + num_moments, 1 + num_moments, ADAM_FLOPS)


def _sgd(inputs: Inputs) -> Work | None:
    """Model SGD, with or without momentum."""
    num_buffers = 1 if inputs.list_shapes(2) else 0
    return foreach_work(inputs, 2 + num_buffers, 1 + num_buffers, SGD_FLOPS)


MODELS: dict[str, Model] = {
    "aten::_fused_adam_": _adam,
    "aten::_fused_adamw_": _adam,
    "aten::_fused_sgd_": _sgd,
    "aten::_fused_adagrad_": partial(
        foreach_work, num_read=3, num_written=2, flops_each=ADAGRAD_FLOPS
    ),
}
