"""Work of loss functions."""

from __future__ import annotations

import math
from functools import partial

from kprof.analyze.work import Inputs, Model, Work, at_least, vector_dtype

_NO_REDUCTION = 0


def _pick(inputs: Inputs) -> Work | None:
    """Model `nll_loss`: one score for each target is read, and one sum (or each loss) written."""
    scores, target, weight = (inputs.tensor(i) for i in range(3))
    if scores is None or target is None:
        return None
    num_losses = target.numel if inputs.value(3) == _NO_REDUCTION else 1
    picked = math.ceil((target.numel + num_losses) * scores.element_bytes)
    moved = target.bytes + picked + (weight.bytes if weight is not None else 0)
    return Work(target.numel, moved, vector_dtype(scores.dtype))


def _pick_backward(inputs: Inputs) -> Work | None:
    """Model its backward: one gradient for each target; the zeros around are another operator's."""
    grad, scores, target = (inputs.tensor(i) for i in range(3))
    if grad is None or scores is None or target is None:
        return None
    written = math.ceil(target.numel * scores.element_bytes)
    return Work(target.numel, grad.bytes + target.bytes + written, vector_dtype(scores.dtype))


def _compare(inputs: Inputs, reduction: int, flops_each: int) -> Work | None:
    """Model a loss between two tensors of one shape."""
    x, target = inputs.tensor(0), inputs.tensor(1)
    if x is None or target is None:
        return None
    is_reduced = inputs.value(reduction) != _NO_REDUCTION
    written = math.ceil(x.element_bytes) if is_reduced else x.written_as()
    return Work(flops_each * x.numel, x.bytes + target.bytes + written, vector_dtype(x.dtype))


def _compare_backward(inputs: Inputs, flops_each: int) -> Work | None:
    """Model its backward: gradient and both tensors read, the input's gradient written."""
    grad, x, target = (inputs.tensor(i) for i in range(3))
    if grad is None or x is None or target is None:
        return None
    moved = grad.bytes + x.bytes + target.bytes + x.written_as()
    return Work(flops_each * x.numel, moved, vector_dtype(x.dtype))


def _align(inputs: Inputs) -> Work | None:
    """Model the CTC loss: scores read, twice as many sums as targets kept for every position."""
    scores, targets = inputs.tensor(0), inputs.tensor(1)
    if scores is None or targets is None or len(scores.shape) < 2:
        return None
    return at_least(Work(None, scores.bytes + targets.bytes))


MODELS: dict[str, Model] = {
    "aten::nll_loss_forward": _pick,
    "aten::nll_loss2d_forward": _pick,
    "aten::nll_loss_backward": _pick_backward,
    "aten::nll_loss2d_backward": _pick_backward,
    "aten::_ctc_loss": _align,
    "aten::_cudnn_ctc_loss": _align,
    "aten::soft_margin_loss": partial(_compare, reduction=2, flops_each=3),
    "aten::mse_loss": partial(_compare, reduction=2, flops_each=3),
    "aten::smooth_l1_loss": partial(_compare, reduction=2, flops_each=3),
    "aten::huber_loss": partial(_compare, reduction=2, flops_each=3),
    "aten::binary_cross_entropy": partial(_compare, reduction=3, flops_each=6),
    "aten::mse_loss_backward": partial(_compare_backward, flops_each=3),
    "aten::smooth_l1_loss_backward": partial(_compare_backward, flops_each=3),
    "aten::huber_loss_backward": partial(_compare_backward, flops_each=3),
    "aten::binary_cross_entropy_backward": partial(_compare_backward, flops_each=6),
}
