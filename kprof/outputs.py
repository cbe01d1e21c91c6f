"""What two callables returned: how far apart it is, and memory that must not hold it already."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from numbers import Number
from typing import Any


def difference_of(a: object, b: object) -> float | None:
    """Return the norm of b - a over that of a, the largest over all their arrays and numbers.

    Infinite where they do not match: in structure, shape, or where one holds NaN and the other
    does not. None where neither holds a number to compare.
    """
    left, right = dict(_leaves(a)), dict(_leaves(b))
    if not left and not right:
        return None
    if left.keys() != right.keys():
        return math.inf
    return max(_relative(left[place], right[place]) for place in left)


def holds_nan(output: object) -> bool:
    """Tell whether some value in `output` is no number."""
    leaves = (_as_float(leaf) for _, leaf in _leaves(output))
    return any(bool((values != values).any()) for values in leaves)


def poison_free_memory(output: object) -> None:
    """Leave NaN where torch will next put tensors of the sizes that are in `output`.

    The caching allocator gives a freed block to the next tensor of its size. On the host there is
    no such cache, and nothing is done.
    """
    torch = sys.modules.get("torch")
    for _, leaf in _leaves(output):
        if torch is not None and isinstance(leaf, torch.Tensor) and leaf.is_cuda:
            block = torch.empty_like(leaf)
            if leaf.is_floating_point():
                block.fill_(math.nan)
            del block


def arrays_in(value: object) -> list[Any]:
    """Return the arrays in `value`, of torch or numpy."""
    return [leaf for _, leaf in _leaves(value) if hasattr(leaf, "shape")]


def size_bytes(value: object) -> int:
    """Return how many bytes the arrays in `value` have; an expanded one has those of its memory."""
    return sum(_size_bytes(leaf) for leaf in arrays_in(value))


def _size_bytes(leaf: Any) -> int:  # noqa: ANN401 - arrays of torch or numpy
    strides = leaf.stride() if callable(getattr(leaf, "stride", None)) else leaf.strides
    size = int(leaf.itemsize)
    for length, stride in zip(leaf.shape, strides, strict=True):
        size *= int(length) if stride else min(1, int(length))
    return size


def share_memory(one: object, other: object) -> bool:
    """Tell whether some array of one lies in the same memory as some array of the other."""
    return bool(_places(one) & _places(other))


def _places(value: object) -> set[tuple[str, int]]:
    """Return where the memory of each array begins, and on which device."""
    found = set()
    for leaf in arrays_in(value):
        if hasattr(leaf, "untyped_storage"):
            found.add((str(leaf.device), leaf.untyped_storage().data_ptr()))
        elif hasattr(leaf, "__array_interface__"):
            base = leaf
            while getattr(base, "base", None) is not None and hasattr(base.base, "shape"):
                base = base.base
            found.add(("cpu", base.__array_interface__["data"][0]))
    return found


def overwrite(output: object, numbers: Mapping[object, Any] | None = None) -> None:
    """Put `numbers`, as of `copy_numbers`, into the arrays of `output`; without them, NaN or 0."""
    torch = sys.modules.get("torch")
    for place, leaf in _leaves(output):
        if not hasattr(leaf, "shape"):
            continue
        if torch is not None and isinstance(leaf, torch.Tensor):
            spoilt = math.nan if leaf.is_floating_point() or leaf.is_complex() else 0
            with torch.no_grad():
                target = leaf.detach()
                target.fill_(spoilt) if numbers is None else target.copy_(numbers[place])
        elif getattr(leaf, "flags", None) is not None and leaf.flags.writeable:
            spoilt = math.nan if leaf.dtype.kind in "fc" else 0
            leaf[...] = spoilt if numbers is None else numbers[place]


def fresh_copy(inputs: tuple[object, ...]) -> tuple[object, ...] | None:
    """Return inputs with new arrays of the same numbers; None where some cannot be copied."""
    copied: list[object] = []
    for value in inputs:
        if hasattr(value, "shape"):
            copied.append(_copied(value))
        elif value is None or isinstance(value, Number | str | bytes):
            copied.append(value)
        else:
            return None
    return tuple(copied)


def copy_numbers(value: object) -> dict[object, Any]:
    """Return a copy of every array and number in `value`, by its place."""
    return {place: _copied(leaf) for place, leaf in _leaves(value)}


def has_changed(kept: Mapping[object, Any], value: object) -> bool:
    """Tell whether `value` holds something else than when `copy_numbers` saw it."""
    now = dict(_leaves(value))
    if now.keys() != kept.keys():
        return True
    return any(_relative(leaf, now[place]) != 0.0 for place, leaf in kept.items())


def _copied(leaf: Any) -> Any:  # noqa: ANN401 - arrays of torch or numpy
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    return leaf.copy() if hasattr(leaf, "shape") else leaf


def _leaves(value: object, place: tuple[object, ...] = ()) -> Iterator[tuple[object, Any]]:
    """Yield the arrays and numbers in a nest of sequences and mappings, each with its place."""
    if value is None or isinstance(value, str | bytes):
        return
    if isinstance(value, Number) or hasattr(value, "shape"):
        yield place, value
    elif isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key], (*place, key))
    elif isinstance(value, Sequence):
        for index, item in enumerate(value):
            yield from _leaves(item, (*place, index))


def _relative(a: Any, b: Any) -> float:  # noqa: ANN401 - arrays of torch or numpy
    if getattr(a, "shape", ()) != getattr(b, "shape", ()):
        return math.inf
    left, right = _as_float(a), _as_float(b)
    # NaN and infinity have to stand in the same places; the rest is measured.
    is_special = (left != left) | (abs(left) == math.inf)
    here, there = left[is_special], right[is_special]
    if not bool(((here == there) | ((here != here) & (there != there))).all()):
        return math.inf
    left, right = left[~is_special], right[~is_special]
    distance = float(((right - left) ** 2).sum()) ** 0.5
    if distance == 0.0:
        return 0.0
    norm = float((left**2).sum()) ** 0.5
    # A NaN only in b makes the distance one.
    return distance / norm if norm and not math.isnan(distance) else math.inf


def _as_float(value: Any) -> Any:  # noqa: ANN401
    """Return a flat array of double precision, on the device where it was."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value = torch.view_as_real(value) if value.is_complex() else value
        return value.detach().double().reshape(-1)
    import numpy as np

    return np.asarray(value, dtype=np.float64).reshape(-1)
