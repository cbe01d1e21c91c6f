"""Work of reductions, scans, selections along dimensions."""

from __future__ import annotations

import math
from functools import partial

from kprof.analyze.work import Inputs, Model, Tensor, Work, at_least, vector_dtype

_INDEX_BYTES = 8


def _first_tensor(inputs: Inputs) -> tuple[int, Tensor] | None:
    """Return the first recorded tensor and its position; some recorders put a result before it."""
    for position in range(len(inputs.shapes)):
        tensor = inputs.tensor(position)
        if tensor is not None:
            return position, tensor
    return None


def _num_results(x: Tensor, dims: object) -> int:
    """Return how many results reducing `dims` leaves; 1 where they are unknown or all."""
    listed = [dims] if isinstance(dims, int) and not isinstance(dims, bool) else dims
    if not isinstance(listed, list) or not listed or not x.shape:
        return 1
    reduced = {d % len(x.shape) for d in listed}
    return math.prod(n for d, n in enumerate(x.shape) if d not in reduced)


def _reduce(
    inputs: Inputs, dims: int = 1, result_bytes: float | None = None, num_results: int = 1
) -> Work | None:
    """Model a reduction whose dimensions are `dims` arguments after its input.

    One FLOP per element read; results have the input's type unless `result_bytes` is given.
    Where the dimensions were not recorded there is at least one result.
    """
    found = _first_tensor(inputs)
    if found is None:
        return None
    position, x = found
    each = x.element_bytes if result_bytes is None else result_bytes
    written = math.ceil(_num_results(x, inputs.value(position + dims)) * num_results * each)
    work = Work(x.numel, x.bytes + written, vector_dtype(x.dtype))
    return work if inputs.values or len(x.shape) < 2 else at_least(work)


def _extreme(inputs: Inputs) -> Work | None:
    """Model `max` and `min`: alone, against another tensor, or along one dimension with places."""
    x, other, dim = inputs.tensor(0), inputs.tensor(1), inputs.value(1)
    if x is None:
        return None
    if other is not None:
        return Work(x.numel, x.bytes + other.bytes + x.written_as(), vector_dtype(x.dtype))
    index_bytes = _INDEX_BYTES if isinstance(dim, int) else 0
    written = _num_results(x, dim) * (x.element_bytes + index_bytes)
    return Work(x.numel, x.bytes + math.ceil(written), vector_dtype(x.dtype))


def _scan(inputs: Inputs) -> Work | None:
    """Model a running sum or product: one result for each element."""
    found = _first_tensor(inputs)
    if found is None:
        return None
    x = found[1]
    return Work(x.numel, x.bytes + x.written_as(), vector_dtype(x.dtype))


def _sort(inputs: Inputs) -> Work | None:
    """Model a sort by its minimum traffic: input read, values and places written."""
    x = inputs.tensor(0)
    return None if x is None else Work(None, x.bytes + x.written_as() + _INDEX_BYTES * x.numel)


def _argsort(inputs: Inputs) -> Work | None:
    """Model a sort that returns places only."""
    x = inputs.tensor(0)
    return None if x is None else Work(None, x.bytes + _INDEX_BYTES * x.numel)


def _top(inputs: Inputs) -> Work | None:
    """Model `topk(x, k, dim)` by its minimum traffic."""
    x, count, dim = inputs.tensor(0), inputs.value(1), inputs.value(2)
    if x is None or not isinstance(count, int):
        return None
    num_kept = _num_results(x, dim if isinstance(dim, int) else -1) * count
    return Work(None, x.bytes + math.ceil(num_kept * (x.element_bytes + _INDEX_BYTES)))


def _running_extreme(inputs: Inputs) -> Work | None:
    """Model a running maximum: values and places are written."""
    x = inputs.tensor(0)
    if x is None:
        return None
    written = x.written_as() + _INDEX_BYTES * x.numel
    return Work(x.numel, x.bytes + written, vector_dtype(x.dtype))


def _selected(inputs: Inputs, dim: int) -> Work | None:
    """Model one value with its place along a dimension: the k-th smallest, a median, a mode."""
    x, along = inputs.tensor(0), inputs.value(dim)
    if x is None:
        return None
    num_kept = _num_results(x, along) if isinstance(along, int) else 1
    index_bytes = _INDEX_BYTES if isinstance(along, int) else 0
    return Work(None, x.bytes + math.ceil(num_kept * (x.element_bytes + index_bytes)))


def _as_many_as_it_finds(inputs: Inputs) -> Work | None:
    """Model a result whose length is in the values: all it is given is read at least."""
    given = inputs.tensors()
    return at_least(Work(None, sum(t.bytes for t in given))) if given else None


def _searched(inputs: Inputs, values: int) -> Work | None:
    """Model finding each value's place in a sorted sequence."""
    first, second, searched = inputs.tensor(0), inputs.tensor(1), inputs.tensor(values)
    if first is None or second is None or searched is None:
        return None
    return Work(None, first.bytes + second.bytes + _INDEX_BYTES * searched.numel)


def _diagonal_sum(inputs: Inputs) -> Work | None:
    """Model the sum of a diagonal."""
    x = inputs.tensor(0)
    if x is None or not x.shape:
        return None
    return Work(min(x.shape), math.ceil((min(x.shape) + 1) * x.element_bytes), "fp32")


def _drawn(inputs: Inputs) -> Work | None:
    """Model drawing places by their weights."""
    x, count = inputs.tensor(0), inputs.value(1)
    if x is None or not isinstance(count, int) or not x.shape:
        return None
    return Work(None, x.bytes + _INDEX_BYTES * count * math.prod(x.shape[:-1]))


def _read_back(inputs: Inputs) -> Work | None:
    """Model reading one value for the host."""
    x = inputs.tensor(0)
    return None if x is None else Work(0, x.bytes)


MODELS: dict[str, Model] = {
    "aten::sum": _reduce,
    "aten::nansum": _reduce,
    "aten::mean": _reduce,
    "aten::prod": _reduce,
    "aten::amax": _reduce,
    "aten::amin": _reduce,
    "aten::logsumexp": _reduce,
    "aten::var": _reduce,
    "aten::std": _reduce,
    "aten::var_mean": partial(_reduce, num_results=2),
    "aten::norm": partial(_reduce, dims=2),
    "aten::linalg_vector_norm": partial(_reduce, dims=2),
    "aten::all": partial(_reduce, result_bytes=1),
    "aten::any": partial(_reduce, result_bytes=1),
    "aten::argmax": partial(_reduce, result_bytes=_INDEX_BYTES),
    "aten::argmin": partial(_reduce, result_bytes=_INDEX_BYTES),
    "aten::count_nonzero": partial(_reduce, result_bytes=_INDEX_BYTES),
    "aten::max": _extreme,
    "aten::min": _extreme,
    "aten::cumsum": _scan,
    "aten::cumsum_": _scan,
    "aten::cumprod": _scan,
    "aten::logcumsumexp": _scan,
    "aten::sort": _sort,
    "aten::argsort": _argsort,
    "aten::topk": _top,
    "aten::std_mean": partial(_reduce, num_results=2),
    "aten::aminmax": partial(_reduce, num_results=2),
    "aten::_logcumsumexp": _scan,
    "aten::cumprod_": _scan,
    "aten::cummax": _running_extreme,
    "aten::cummin": _running_extreme,
    "aten::_cummax_helper": _running_extreme,
    "aten::_cummin_helper": _running_extreme,
    "aten::kthvalue": partial(_selected, dim=2),
    "aten::median": partial(_selected, dim=1),
    "aten::nanmedian": partial(_selected, dim=1),
    "aten::mode": partial(_selected, dim=1),
    "aten::masked_select": _as_many_as_it_finds,
    "aten::nonzero": _as_many_as_it_finds,
    "aten::repeat_interleave": _as_many_as_it_finds,
    "aten::unique_dim": _as_many_as_it_finds,
    "aten::unique_consecutive": _as_many_as_it_finds,
    "aten::_unique": _as_many_as_it_finds,
    "aten::_unique2": _as_many_as_it_finds,
    "aten::bincount": _as_many_as_it_finds,
    "aten::histc": _as_many_as_it_finds,
    "aten::equal": _as_many_as_it_finds,
    "aten::searchsorted": partial(_searched, values=1),
    "aten::bucketize": partial(_searched, values=0),
    "aten::trace": _diagonal_sum,
    "aten::multinomial": _drawn,
    "aten::_local_scalar_dense": _read_back,
}
