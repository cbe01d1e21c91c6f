"""Work of reductions, scans and selections along dimensions."""

from __future__ import annotations

import math
from functools import partial

from kprof.analyze.work import Inputs, Model, Tensor, Work, vector_dtype

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


def _reduce(inputs: Inputs, dims: int = 1, result_bytes: float | None = None) -> Work | None:
    """Model a reduction whose dimensions are `dims` arguments after its input.

    One FLOP per element read; results have the input's type unless `result_bytes` is given.
    """
    found = _first_tensor(inputs)
    if found is None:
        return None
    position, x = found
    each = x.element_bytes if result_bytes is None else result_bytes
    written = math.ceil(_num_results(x, inputs.value(position + dims)) * each)
    return Work(x.numel, x.bytes + written, vector_dtype(x.dtype))


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
    """Model a sort by its least bytes: input read, values and places written."""
    x = inputs.tensor(0)
    return None if x is None else Work(None, x.bytes + x.written_as() + _INDEX_BYTES * x.numel)


def _argsort(inputs: Inputs) -> Work | None:
    """Model a sort that returns places only."""
    x = inputs.tensor(0)
    return None if x is None else Work(None, x.bytes + _INDEX_BYTES * x.numel)


def _top(inputs: Inputs) -> Work | None:
    """Model `topk(x, k, dim)` by its least bytes."""
    x, count, dim = inputs.tensor(0), inputs.value(1), inputs.value(2)
    if x is None or not isinstance(count, int):
        return None
    num_kept = _num_results(x, dim if isinstance(dim, int) else -1) * count
    return Work(None, x.bytes + math.ceil(num_kept * (x.element_bytes + _INDEX_BYTES)))


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
    "aten::var_mean": _reduce,
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
    "aten::_local_scalar_dense": _read_back,
}
