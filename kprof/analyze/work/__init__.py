"""Work models: FLOPs, minimum traffic of an operator from its shapes, one family a module.

A module here has `MODELS`, from an operator's name to a function of its inputs, and may have
`PREFIXES`, the same for beginnings of names. FLOPs are those of the mathematical operation, 2 per
multiply-add; bytes are each input read once and each output written once, in their types. A model
that lacks a shape or a type returns None.

A model covers the operator's own part: the work of another recorded operator inside it (zeroing a
gradient before values are added to it, say) belongs to that one. The module's name is the family,
which decides who carries nested work (`roofline/operator_work.py`): merge only families of equal
precedence. Outside matrix multiplications FLOPs are a convention (an addition, a multiplication,
an exponential count 1 each): such operators are limited by memory, and the count is consistent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from kprof.analyze.element_type import COMPLEX, FLOATING, size_bytes, type_of

Shape = tuple[int, ...]
Bound = Literal["at least", "at most"]


@dataclass(frozen=True)
class Tensor:
    """One input: its shape, its short type, its strides where they were recorded."""

    shape: Shape
    dtype: str
    strides: Shape | None = None

    @property
    def numel(self) -> int:
        """Elements that an operation sees."""
        return math.prod(self.shape)

    @property
    def element_bytes(self) -> float:
        """Bytes of one element."""
        return size_bytes(self.dtype)

    @property
    def stored(self) -> int:
        """Elements that stand in memory: an expanded dimension (stride 0) repeats one."""
        strides = self.strides
        if strides is None or len(strides) != len(self.shape):
            return self.numel
        if 0 in self.shape:
            return 0
        return math.prod(n for n, s in zip(self.shape, strides, strict=True) if s != 0)

    @property
    def bytes(self) -> int:
        """Bytes of the stored elements."""
        return math.ceil(self.stored * self.element_bytes)

    def written_as(self, dtype: str | None = None) -> int:
        """Return the bytes of a fresh result of this shape, in `dtype` or in its own type."""
        return math.ceil(self.numel * size_bytes(dtype or self.dtype))


@dataclass(frozen=True)
class Inputs:
    """An operator's arguments as recorded, by position."""

    shapes: tuple[Any, ...]
    """Dimensions of a tensor; for a list of tensors a tuple of such tuples; () for others."""
    dtypes: tuple[str, ...]
    strides: tuple[Any, ...] = ()
    values: tuple[str, ...] = ()
    """Texts of the arguments that are no tensors, empty for the others."""
    element_bytes: float | None = None
    """An element's size as a kernel's name tells it: recorders leave out the types in lists."""
    message: str | None = None
    """A field of a collective's record: the column of `ranges` of that name."""

    def tensor(self, index: int) -> Tensor | None:
        """Return the tensor at `index`, or None where there is none or it was not recorded."""
        if index >= len(self.shapes) or index >= len(self.dtypes):
            return None
        dtype = type_of(self.dtypes[index])
        shape = self.shapes[index]
        if dtype is None or any(not isinstance(n, int) for n in shape):
            return None
        strides = self.strides[index] if index < len(self.strides) else ()
        usable = len(strides) == len(shape) and all(isinstance(s, int) for s in strides)
        return Tensor(tuple(shape), dtype, tuple(strides) if usable else None)

    def tensors(self) -> list[Tensor]:
        """Return every tensor among the arguments, in order."""
        return list(self._tensors)

    @cached_property
    def _tensors(self) -> tuple[Tensor, ...]:
        found = (self.tensor(i) for i in range(len(self.shapes)))
        return tuple(t for t in found if t is not None)

    def list_shapes(self, index: int) -> tuple[Shape, ...]:
        """Return the shapes of a list of tensors; empty where they were not recorded."""
        if index >= len(self.shapes) or self.dtypes[index] not in ("TensorList", "GenericList"):
            return ()
        shapes = self.shapes[index]
        return tuple(tuple(s) for s in shapes) if all(isinstance(s, tuple) for s in shapes) else ()

    @cached_property
    def bytes(self) -> int:
        """Bytes of all tensors, those of lists too where an element's size is known."""
        return self._bytes_of(self.tensors(), self._listed())

    @property
    def repeated(self) -> int:
        """Bytes of tensors that look like one before: in shape, type and, where known, strides."""
        return self.bytes - self._bytes_of(set(self.tensors()), set(self._listed()))

    def _listed(self) -> list[Shape]:
        return [shape for i in range(len(self.shapes)) for shape in self.list_shapes(i)]

    def _bytes_of(self, tensors: Iterable[Tensor], listed: Iterable[Shape]) -> int:
        num_listed = sum(math.prod(shape) for shape in listed)
        return sum(t.bytes for t in tensors) + math.ceil(num_listed * (self.element_bytes or 0))

    def value(self, index: int) -> Any:  # noqa: ANN401 - a recorded scalar has any type
        """Return the argument at `index` as a Python value, or None where it was not recorded."""
        text = self.values[index] if index < len(self.values) else ""
        if text in ("True", "False"):
            return text == "True"
        try:
            return json.loads(text.replace("True", "true").replace("False", "false"))
        except ValueError:
            return None


@dataclass(frozen=True)
class Work:
    """Work of an operator; `flops` is None where only the bytes are known."""

    flops: int | None
    bytes: int
    dtype: str | None = None
    """The type whose peak limits the FLOPs."""
    bound: Bound | None = None
    """Whether it is only a bound, where the arguments do not tell all; None where it is exact."""
    written: int | None = None
    """Bytes written, where they differ from the bytes that the inputs leave."""
    may_repeat: int = 0
    """Bytes that do not move through memory if operands that look alike are one tensor."""


def written_by(work: Work, inputs: Inputs) -> int:
    """Return how many of the bytes are written: all but the inputs' own, unless the work says."""
    if work.written is not None:
        return work.written
    return max(work.bytes - inputs.bytes, 0)


def may_repeat(work: Work, inputs: Inputs) -> int:
    """Return how many of the bytes are read in vain if operands that look alike are one tensor.

    Addresses of tensors are not recorded, so `x + x` looks like two operands. 0 where the work is a
    bound, or does not read every input once: the inputs that it reads are unknown then.
    """
    written = written_by(work, inputs)
    reads_each_once = written > 0 and work.bytes - written == inputs.bytes
    return inputs.repeated if work.bound is None and reads_each_once else 0


def at_least(work: Work | None) -> Work | None:
    """Declare work a lower bound."""
    return replace(work, bound="at least") if work is not None else None


Model = Callable[[Inputs], Work | None]


def parse_inputs(
    shapes: str,
    dtypes: str,
    strides: str | None = None,
    values: str | None = None,
    element_bytes: float | None = None,
    message: str | None = None,
) -> Inputs:
    """Read the JSON texts of a row of `ranges`."""
    return Inputs(
        message=message,
        shapes=_as_tuples(json.loads(shapes)),
        dtypes=tuple(str(t) for t in json.loads(dtypes)),
        strides=_as_tuples(json.loads(strides)) if strides else (),
        values=tuple(str(v) for v in json.loads(values)) if values else (),
        element_bytes=element_bytes,
    )


def _as_tuples(value: Any) -> Any:  # noqa: ANN401 - nested lists of a JSON text
    """Turn nested lists into nested tuples."""
    return tuple(_as_tuples(v) for v in value) if isinstance(value, list) else value


def promote(tensors: Sequence[Tensor]) -> str:
    """Return the type of the result of arithmetic on `tensors`, as PyTorch promotes them.

    A tensor without dimensions is mostly a wrapped number: it counts only against its like, or
    turns integers into floats.
    """
    dimensioned = [t.dtype for t in tensors if t.shape]
    others = [t.dtype for t in tensors if not t.shape]
    best = max(dimensioned or others, key=_promotion_rank)
    makes_float = bool(dimensioned) and best not in FLOATING and any(d in FLOATING for d in others)
    return "fp32" if makes_float else best


def _promotion_rank(dtype: str) -> tuple[bool, float]:
    """Order types so that the promoted one is the greatest."""
    return dtype in FLOATING, size_bytes(dtype)


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """Return the common shape of `shapes`."""
    width = max((len(s) for s in shapes), default=0)
    padded = [(1,) * (width - len(s)) + s for s in shapes]
    return tuple(_common(dims) for dims in zip(*padded, strict=True))


def _common(dims: Sequence[int]) -> int:
    """Return the common length of one dimension: zero where any is empty."""
    return 0 if 0 in dims else max(dims)


def multiply_add_flops(dtype: str) -> int:
    """Return the real FLOPs of one multiply-add: a complex one is four products and four sums."""
    return 8 if dtype in COMPLEX else 2


def vector_dtype(dtype: str) -> str:
    """Return the type in which the vector units compute on operands of `dtype`."""
    return "fp64" if dtype in ("fp64", "complex128") else "fp32"
