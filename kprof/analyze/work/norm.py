"""Work of normalizations.

FLOPs per element, by convention: layer, group and batch norm take 8 forward (mean 1, variance 3,
centre and scale 2, affine 2) and 12 backward; RMS norm 4 and 9. Normalizing with given statistics
takes 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from kprof.analyze.work import Inputs, Model, Tensor, Work, vector_dtype

_STATISTIC_BYTES = 4


@dataclass(frozen=True)
class Rows:
    """Positions of the arguments of a norm over rows, and what it keeps for its backward."""

    x: int
    weight: int
    bias: int | None
    num_statistics: int
    flops_each: int


def _over_rows(inputs: Inputs, rows: Rows) -> Work | None:
    """Model a norm over the last dimensions: input and affine read, result, statistics written."""
    x = inputs.tensor(rows.x)
    if x is None or not x.shape:
        return None
    affine = _affine(inputs, rows.weight, rows.bias)
    width = _width(inputs, x, affine, rows.x + 1)
    statistics = rows.num_statistics * _STATISTIC_BYTES * (x.numel // max(width, 1))
    moved = x.bytes + sum(t.bytes for t in affine) + x.written_as() + statistics
    return Work(rows.flops_each * x.numel, moved, vector_dtype(x.dtype))


def _affine(inputs: Inputs, weight: int, bias: int | None) -> list[Tensor]:
    """Return weight and bias, as far as there are any."""
    found = [inputs.tensor(weight), inputs.tensor(bias) if bias is not None else None]
    return [t for t in found if t is not None]


def _width(inputs: Inputs, x: Tensor, affine: list[Tensor], shape_argument: int) -> int:
    """Return the elements of a row: as the weight has, as the argument says, or the last length."""
    if affine:
        return affine[0].numel
    given = inputs.value(shape_argument)
    return math.prod(given) if isinstance(given, list) and given else x.shape[-1]


def _over_rows_backward(
    inputs: Inputs, weight: int, statistics: tuple[int, ...], flops_each: int, num_affine: int
) -> Work | None:
    """Model its backward: gradient, input, statistics, weight read; all gradients written."""
    grad, x, scale = inputs.tensor(0), inputs.tensor(1), inputs.tensor(weight)
    if grad is None or x is None:
        return None
    kept = [inputs.tensor(i) for i in statistics]
    moved = grad.bytes + x.bytes + x.written_as() + sum(t.bytes for t in kept if t is not None)
    moved += scale.bytes * (1 + num_affine) if scale is not None else 0
    return Work(flops_each * x.numel, moved, vector_dtype(x.dtype))


def _over_batch(inputs: Inputs, training: int | None = 5) -> Work | None:
    """Model batch norm: in training the running statistics are updated and the batch's kept."""
    x = inputs.tensor(0)
    if x is None or len(x.shape) < 2:
        return None
    learns = training is None or inputs.value(training) is not False
    per_channel = [inputs.tensor(i) for i in range(1, 5)]
    read = sum(t.bytes for t in per_channel if t is not None)
    written = x.written_as()
    if learns:
        written += sum(t.bytes for t in per_channel[2:] if t is not None)
        written += 2 * _STATISTIC_BYTES * x.shape[1]
    return Work((8 if learns else 4) * x.numel, x.bytes + read + written, vector_dtype(x.dtype))


def _over_batch_backward(inputs: Inputs, weight: int = 2) -> Work | None:
    """Model its backward; gradient and input may stand in either order."""
    first, second, scale = inputs.tensor(0), inputs.tensor(1), inputs.tensor(weight)
    if first is None or second is None or len(second.shape) < 2:
        return None
    kept = 2 * _STATISTIC_BYTES * second.shape[1]
    moved = first.bytes + second.bytes + second.written_as() + kept
    moved += 3 * scale.bytes if scale is not None else 0
    return Work(12 * second.numel, moved, vector_dtype(second.dtype))


def _batch_part(inputs: Inputs, num_read: int, writes_result: bool, flops_each: int) -> Work | None:
    """Model one of the parts that batch norm over several GPUs is made of.

    Statistics of a channel are left out: they are small against one sample.
    """
    read = [inputs.tensor(i) for i in range(num_read)]
    known = [t for t in read if t is not None]
    if len(known) < num_read:
        return None
    written = known[0].written_as() if writes_result else 0
    return Work(flops_each * known[0].numel, sum(t.bytes for t in known) + written, "fp32")


def _over_groups(inputs: Inputs) -> Work | None:
    """Model group norm: as layer norm, with statistics for each group of each sample."""
    x = inputs.tensor(0)
    if x is None:
        return None
    samples, groups = inputs.value(3), inputs.value(6)
    num_rows = samples * groups if isinstance(samples, int) and isinstance(groups, int) else 0
    affine = sum(t.bytes for t in _affine(inputs, 1, 2))
    moved = x.bytes + affine + x.written_as() + 2 * _STATISTIC_BYTES * num_rows
    return Work(8 * x.numel, moved, vector_dtype(x.dtype))


_LAYER = Rows(x=0, weight=2, bias=3, num_statistics=2, flops_each=8)
_RMS = Rows(x=0, weight=2, bias=None, num_statistics=1, flops_each=4)
_layer_backward = partial(
    _over_rows_backward, weight=5, statistics=(3, 4), flops_each=12, num_affine=2
)
_rms_backward = partial(_over_rows_backward, weight=4, statistics=(3,), flops_each=9, num_affine=1)
_group_backward = partial(
    _over_rows_backward, weight=4, statistics=(2, 3), flops_each=12, num_affine=2
)


def _over_weights(inputs: Inputs) -> Work | None:
    """Model weight norm: direction and length read, the weight and the norms written."""
    direction, length = inputs.tensor(0), inputs.tensor(1)
    if direction is None or length is None:
        return None
    moved = direction.bytes + direction.written_as() + length.bytes + length.written_as("fp32")
    return Work(3 * direction.numel, moved, vector_dtype(direction.dtype))


def _over_weights_backward(inputs: Inputs) -> Work | None:
    """Model its backward: gradient, direction, length and norms read, both gradients written."""
    given = [inputs.tensor(i) for i in range(4)]
    grad, direction, length, _ = given
    if grad is None or direction is None or length is None:
        return None
    read = sum(t.bytes for t in given if t is not None)
    moved = read + direction.written_as() + length.written_as()
    return Work(5 * direction.numel, moved, vector_dtype(direction.dtype))


MODELS: dict[str, Model] = {
    "aten::_weight_norm_interface": _over_weights,
    "aten::_weight_norm_interface_backward": _over_weights_backward,
    "aten::_native_batch_norm_legit_no_training": partial(_over_batch, training=5),
    "aten::batch_norm_update_stats": partial(
        _batch_part, num_read=1, writes_result=False, flops_each=4
    ),
    "aten::native_layer_norm": partial(_over_rows, rows=_LAYER),
    "aten::native_layer_norm_backward": _layer_backward,
    "aten::_fused_rms_norm": partial(_over_rows, rows=_RMS),
    "aten::_fused_rms_norm_backward": _rms_backward,
    "aten::native_group_norm": _over_groups,
    "aten::native_group_norm_backward": _group_backward,
    "aten::cudnn_batch_norm": _over_batch,
    "aten::miopen_batch_norm": _over_batch,
    "aten::native_batch_norm": _over_batch,
    "aten::_native_batch_norm_legit": _over_batch,
    "aten::_batch_norm_with_update": partial(_over_batch, training=None),
    "aten::cudnn_batch_norm_backward": _over_batch_backward,
    "aten::miopen_batch_norm_backward": _over_batch_backward,
    "aten::native_batch_norm_backward": _over_batch_backward,
    "aten::batch_norm_backward": _over_batch_backward,
    "aten::batch_norm_stats": partial(_batch_part, num_read=1, writes_result=False, flops_each=4),
    "aten::batch_norm_elemt": partial(_batch_part, num_read=1, writes_result=True, flops_each=4),
    "aten::batch_norm_backward_reduce": partial(
        _batch_part, num_read=2, writes_result=False, flops_each=4
    ),
    "aten::batch_norm_backward_elemt": partial(
        _batch_part, num_read=2, writes_result=True, flops_each=6
    ),
}
