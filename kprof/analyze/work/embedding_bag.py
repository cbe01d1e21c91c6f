"""Work of lookups that add up the rows of each bag.

Which rows are looked up is not recorded, nor in tables of several widths how wide a row is: what
is certain is that indices are read and results written.
"""

from __future__ import annotations

import math
from functools import partial

from kprof.analyze.work import Inputs, Model, Tensor, Work, at_least

_SUM, _MEAN, _MAX = range(3)
# FBGEMM keeps scale and offset of each row of 8-bit numbers behind them.
_ROW_SCALE_BYTES = 8


def _bags(inputs: Inputs) -> Work | None:
    """Model `embedding_bag(table, indices, offsets, …)`."""
    table, index, offsets = (inputs.tensor(i) for i in range(3))
    if table is None or index is None or offsets is None or len(table.shape) != 2:
        return None
    looked_up = math.ceil(index.numel * table.shape[1] * table.element_bytes)
    num_out = offsets.numel * table.shape[1]
    written = math.ceil(num_out * table.element_bytes)
    moved = index.bytes + offsets.bytes + min(looked_up, table.bytes) + written
    return Work(index.numel * table.shape[1], moved, "fp32")


def _bags_backward(inputs: Inputs) -> Work | None:
    """Model its backward: each row of the gradient is added to the rows of its bag."""
    grad, index = inputs.tensor(0), inputs.tensor(1)
    if grad is None or index is None or len(grad.shape) != 2:
        return None
    num_added = index.numel * grad.shape[1]
    return at_least(Work(num_added, grad.bytes + index.bytes + grad.written_as(), "fp32"))


def _tables(inputs: Inputs) -> Work | None:
    """Model FBGEMM's lookup in many tables: its indices read, and the results written if known.

    The indices are the longest of its whole numbers but for the tables' own; offsets follow them.
    """
    widths, total_width = inputs.tensor(6), inputs.value(7)
    index, offsets, weights = inputs.tensor(11), inputs.tensor(12), inputs.tensor(14)
    if widths is None or index is None or offsets is None:
        return None
    moved = sum(t.bytes for t in (index, offsets, weights) if t is not None)
    if isinstance(total_width, int):
        num_bags = (offsets.numel - 1) // max(widths.numel - 1, 1)
        moved += 4 * num_bags * total_width
    return at_least(Work(None, moved))


def _all_given(inputs: Inputs) -> Work | None:
    """Model an operator that at least reads all it is given."""
    given = inputs.tensors()
    return at_least(Work(None, sum(t.bytes for t in given))) if given else None


def _permute(inputs: Inputs) -> Work | None:
    """Model reordering features: all it is given is read, lengths of each feature written."""
    order, lengths, values = (inputs.tensor(i) for i in range(3))
    if order is None or lengths is None or values is None or len(lengths.shape) != 2:
        return None
    written = math.ceil(order.numel * lengths.shape[1] * lengths.element_bytes)
    return at_least(Work(0, sum(t.bytes for t in inputs.tensors()) + written))


def _check(inputs: Inputs) -> Work | None:
    """Model looking at each index and offset."""
    known = [t for i in range(3) if (t := inputs.tensor(i)) is not None]
    return Work(0, sum(t.bytes for t in known)) if len(known) == 3 else None


def _convert(inputs: Inputs, dtype: str, more_columns: int = 0) -> Work | None:
    """Model a conversion to `dtype`; rows may become longer or shorter by some columns."""
    x = inputs.tensor(0)
    if x is None or not x.shape:
        return None
    out = Tensor((*x.shape[:-1], x.shape[-1] + more_columns), dtype)
    return Work(x.numel, x.bytes + out.bytes, "fp32")


MODELS: dict[str, Model] = {
    "aten::_embedding_bag": _bags,
    "aten::_embedding_bag_forward_only": _bags,
    "aten::_embedding_bag_dense_backward": _bags_backward,
    "fbgemm::bounds_check_indices": _check,
    "fbgemm::permute_2D_sparse_data": _permute,
    "fbgemm::permute_sparse_features": _permute,
    "fbgemm::FloatToFP8RowwiseQuantized": partial(
        _convert, dtype="uint8", more_columns=_ROW_SCALE_BYTES
    ),
    "fbgemm::FloatToFused8BitRowwiseQuantized": partial(
        _convert, dtype="uint8", more_columns=_ROW_SCALE_BYTES
    ),
    "fbgemm::FP8RowwiseQuantizedToFloat": partial(
        _convert, dtype="fp32", more_columns=-_ROW_SCALE_BYTES
    ),
    "fbgemm::Fused8BitRowwiseQuantizedToFloat": partial(
        _convert, dtype="fp32", more_columns=-_ROW_SCALE_BYTES
    ),
    "fbgemm::FloatToHFP8Quantized": partial(_convert, dtype="uint8"),
    "fbgemm::HFP8QuantizedToFloat": partial(_convert, dtype="fp32"),
    "fbgemm::FloatToBfloat16Quantized": partial(_convert, dtype="bf16"),
    "fbgemm::Bfloat16QuantizedToFloat": partial(_convert, dtype="fp32"),
}

PREFIXES: dict[str, Model] = {
    "fbgemm::split_embedding_codegen_lookup_": _tables,
    "torch::autograd::CppNode<SplitLookupFunction_": _all_given,
    "torch::autograd::CppNode<SplitNoBagLookupFunction_": _all_given,
}
