"""Work of operators that read or write at places which an index names.

How often an index repeats is not recorded: every place counts as often as it is named, but
never more than the table holds.
"""

from __future__ import annotations

import math
from functools import partial

from kprof.analyze.work import Inputs, Model, Tensor, Work, at_least


def _lookup(table: Tensor, index: Tensor, num_out: int) -> Work:
    """Return the work of reading `num_out` elements by `index` and writing them together."""
    moved = math.ceil(num_out * table.element_bytes)
    return Work(0, index.bytes + min(moved, table.bytes) + moved, written=moved)


def _embedding(inputs: Inputs) -> Work | None:
    """Model `embedding(weight, indices)`."""
    table, index = inputs.tensor(0), inputs.tensor(1)
    if table is None or index is None or len(table.shape) != 2:
        return None
    return _lookup(table, index, index.numel * table.shape[1])


def _index_select(inputs: Inputs) -> Work | None:
    """Model `index_select(table, dim, index)`."""
    table, dim, index = inputs.tensor(0), inputs.value(1), inputs.tensor(2)
    if table is None or index is None or not isinstance(dim, int) or not table.shape:
        return None
    num_rows = table.shape[dim]
    return _lookup(table, index, table.numel // max(num_rows, 1) * index.numel)


def _gather(inputs: Inputs) -> Work | None:
    """Model `gather(table, dim, index)`."""
    table, index = inputs.tensor(0), inputs.tensor(2)
    return None if table is None or index is None else _lookup(table, index, index.numel)


def _take(inputs: Inputs) -> Work | None:
    """Model `take(table, index)`."""
    table, index = inputs.tensor(0), inputs.tensor(1)
    return None if table is None or index is None else _lookup(table, index, index.numel)


def _index(inputs: Inputs) -> Work | None:
    """Model `index(table, [index, …])` where the list's shapes were recorded, integers assumed.

    The indices broadcast together and stand for as many leading dimensions.
    """
    table, shapes = inputs.tensor(0), inputs.list_shapes(1)
    if table is None or not shapes or len(shapes) > len(table.shape):
        return None
    num_places = max(math.prod(s) for s in shapes)
    num_out = num_places * math.prod(table.shape[len(shapes) :])
    moved = math.ceil(num_out * table.element_bytes)
    index_bytes = 8 * sum(math.prod(s) for s in shapes)
    return Work(0, index_bytes + min(moved, table.bytes) + moved)


def _index_put(inputs: Inputs) -> Work | None:
    """Model `index_put_(table, indices, values, accumulate)`; the indices are rarely recorded.

    A single value says nothing about how many places it goes to.
    """
    table, values, adds = inputs.tensor(0), inputs.tensor(2), inputs.value(3)
    if table is None or values is None or values.numel <= 1:
        return None
    touched = min(values.written_as(), table.bytes)
    return Work(values.numel if adds else 0, values.bytes + touched * (2 if adds else 1), "fp32")


def _scatter(inputs: Inputs, adds: bool) -> Work | None:
    """Model writing (or adding) `source` into a table at `index`; a missing source is a number."""
    table, index, source = inputs.tensor(0), inputs.tensor(2), inputs.tensor(3)
    if table is None or index is None:
        return None
    count = source.numel if source is not None else index.numel
    touched = min(math.ceil(count * table.element_bytes), table.bytes)
    read = index.bytes + (source.bytes if source is not None else 0)
    return Work(count if adds else 0, read + touched * (2 if adds else 1), "fp32")


def _embedding_backward(inputs: Inputs) -> Work | None:
    """Model the gradient of an embedding: rows of `grad` are added up by index.

    The zeros of the rows that no index names are another operator's.
    """
    grad, index, num_rows = inputs.tensor(0), inputs.tensor(1), inputs.value(2)
    if grad is None or index is None or not grad.shape:
        return None
    width = grad.shape[-1]
    rows = min(index.numel, num_rows) if isinstance(num_rows, int) else index.numel
    written = math.ceil(rows * width * grad.element_bytes)
    return Work(grad.numel, grad.bytes + index.bytes + written, "fp32")


def _index_fill(inputs: Inputs) -> Work | None:
    """Model writing one value to whole slices: `index_fill_(table, dim, index, value)`."""
    table, dim, index = inputs.tensor(0), inputs.value(1), inputs.tensor(2)
    if table is None or index is None or not isinstance(dim, int) or not table.shape:
        return None
    each = table.numel // max(table.shape[dim], 1)
    written = min(math.ceil(each * index.numel * table.element_bytes), table.bytes)
    return Work(0, index.bytes + written)


def _put(inputs: Inputs) -> Work | None:
    """Model `put_(table, index, source)`."""
    table, index, source = (inputs.tensor(i) for i in range(3))
    if table is None or index is None or source is None:
        return None
    return Work(0, index.bytes + source.bytes + min(source.written_as(table.dtype), table.bytes))


def _masked_put(inputs: Inputs) -> Work | None:
    """Model writing to the places of a mask; how many are set was not recorded."""
    table, mask = inputs.tensor(0), inputs.tensor(1)
    return None if table is None or mask is None else at_least(Work(0, mask.bytes))


def _from_input_sizes(inputs: Inputs) -> Work | None:
    """Model adding up a gradient into one of the shape that the second argument tells."""
    grad, sizes = inputs.tensor(0), inputs.value(1)
    if grad is None or not isinstance(sizes, list):
        return None
    written = math.ceil(math.prod(sizes) * grad.element_bytes)
    return Work(grad.numel, grad.bytes + written, "fp32")


MODELS: dict[str, Model] = {
    "aten::embedding": _embedding,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::index_select": _index_select,
    "aten::gather": _gather,
    "aten::take": _take,
    "aten::index": _index,
    "aten::index_put_": _index_put,
    "aten::_index_put_impl_": _index_put,
    "aten::_unsafe_index_put": _index_put,
    "aten::scatter": partial(_scatter, adds=False),
    "aten::scatter_": partial(_scatter, adds=False),
    "aten::index_copy_": partial(_scatter, adds=False),
    "aten::scatter_add": partial(_scatter, adds=True),
    "aten::scatter_add_": partial(_scatter, adds=True),
    "aten::scatter_reduce_": partial(_scatter, adds=True),
    "aten::index_fill_": _index_fill,
    "aten::put_": _put,
    "aten::masked_scatter_": _masked_put,
    "aten::unfold_backward": _from_input_sizes,
    "aten::_unsafe_index": _index,
    "aten::index_put": _index_put,
    "aten::index_add": partial(_scatter, adds=True),
    "aten::index_copy": partial(_scatter, adds=False),
    "aten::index_reduce_": partial(_scatter, adds=True),
    "aten::scatter_reduce": partial(_scatter, adds=True),
    "aten::index_add_": partial(_scatter, adds=True),
}
