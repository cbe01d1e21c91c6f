"""Inputs of the gate: their values, their layouts in memory, the cases worth a look."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kprof.kernels.correctness.memory import GUARD_BYTES, NAN_BYTE
from kprof.kernels.correctness.subject import Case, Shape, Subject

OUTLIER_SHARE = 0.02
OUTLIER_SCALE = 50.0
SMALL = 1e-3
OFFSET = 8.0
FAR_ELEMENTS = 2**31
SHIFT_BYTES = 16
"""Alignment of what is laid out "shifted": enough for loads of 128 bits, and for no wider ones."""
ROWS = 2**16
"""Size that the first free dimension grows to where no `reach` is given."""
HOST_ELEMENTS = 2**20
"""Larger tensors are drawn on the device; after a CUDA graph that failed, that may not work."""
POOLED_ELEMENTS = 2**24
"""Size up to which calls get more rows, so that few of them give values enough."""


class Draw:
    """Draws the arguments of one case, the same whenever it is asked in the same order."""

    def __init__(self, case: Case, subject: Subject) -> None:
        self.case = case
        self.subject = subject
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        seed = 1_000_003 * subject.seed + case.seed
        self._generator = torch.Generator().manual_seed(seed)
        self._on_device = torch.Generator(subject.device).manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        """Return data of the case's distribution, one row per last dimension."""
        values = self._normal(shape)
        generator = self._generator if values.device.type == "cpu" else self._on_device
        return self._place(_spread(values, self.case, self.subject, generator))

    def plain(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        """Return normal values, or such of both signs: weights, and what else is tame."""
        values = self._normal(shape) * scale + shift
        if self.case.distribution == "negative":
            # Weights of both signs with any shift.
            values *= torch.where(self._normal(shape) < 0, -1.0, 1.0)
        return self._place(values)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Return integers from 0 to below `high`, or zeros where there is none."""
        drawn = torch.randint(max(high, 1), shape, generator=self._generator)
        return drawn.to(self.subject.device)

    def _normal(self, shape: Shape) -> Tensor:
        if self.subject.device == "cpu" or math.prod(shape) <= HOST_ELEMENTS:
            return torch.randn(shape, generator=self._generator)
        return torch.randn(shape, generator=self._on_device, device=self.subject.device)

    def _place(self, values: Tensor) -> Tensor:
        return values.to(self.dtype).to(self.subject.device)


def _spread(values: Tensor, case: Case, subject: Subject, generator: torch.Generator) -> Tensor:
    """Turn normal values into those of the case's distribution."""
    name = case.distribution
    if name in ("zeros", "half_zero"):
        # Zeros come first, so that code which looks at the beginning only is led astray. Some are
        # negative, as values were: bits tell these apart.
        kept = values.reshape(-1).clone()
        kept[: kept.numel() if name == "zeros" else (kept.numel() + 1) // 2] *= 0
        return kept.reshape(values.shape)
    if name == "outliers" and values.dim():
        share = torch.rand(values.shape[-1], generator=generator, device=generator.device)
        is_outlier = share < OUTLIER_SHARE
        return torch.where(is_outlier, values * OUTLIER_SCALE, values)
    if name == "uneven" and values.dim():
        share = torch.rand((*values.shape[:-1], 1), generator=generator, device=generator.device)
        return values * 10 ** (4 * share - 3)
    if name == "negative":
        return -values.abs()
    if name == "nonfinite" and values.numel():
        return _with_nonfinite(values, generator)
    factor = {"large": subject.large, "small": SMALL}.get(name, 1.0)
    return values * factor + (OFFSET if name == "offset" else 0.0)


def _with_nonfinite(values: Tensor, generator: torch.Generator) -> Tensor:
    """Return the values with one NaN, one inf and one -inf, the last element among them."""
    flat = values.reshape(-1).clone()
    places = torch.randint(flat.numel(), (3,), generator=generator, device=generator.device)
    places[0] = flat.numel() - 1
    flat[places] = torch.tensor([math.nan, math.inf, -math.inf], device=flat.device)
    return flat.reshape(values.shape)


@dataclass(frozen=True)
class Placed:
    """A tensor laid out in a larger buffer, whose other bytes are poison."""

    view: Tensor
    buffer: Tensor | None
    before: Tensor | None
    """The buffer's bytes when it was placed."""

    def was_changed(self) -> Tensor:
        """Tell, on its device, whether its own values differ from those that were placed."""
        if self.before is None:
            return torch.tensor(False)
        return are_other_bits(self.view, self._same_view(self.before))

    def was_overrun(self) -> Tensor:
        """Tell, on its device, whether anything around the tensor was written."""
        if self.before is None or self.buffer is None:
            return torch.tensor(False)
        expected = self.before.clone()
        own = self.view.detach()
        is_shared = any(n > 1 and not step for n, step in zip(own.shape, own.stride(), strict=True))
        same = self._same_view(expected)
        (same[:1] if is_shared else same).copy_(own[:1] if is_shared else own)
        return (expected != self.buffer).any()

    def _same_view(self, buffer: Tensor) -> Tensor:
        view = self.view
        values = buffer.view(view.dtype)
        return values.as_strided(view.shape, view.stride(), view.storage_offset())


def place(tensor: Tensor, layout: str) -> Placed:
    """Lay a tensor out so, between guard bands; its values stay what they are."""
    if tensor.numel() == 0:
        return Placed(tensor.clone(), None, None)
    if layout == "far":
        return _place_far(tensor)
    if layout == "expanded":
        return _place_expanded(tensor)
    stride = _strides(tensor.shape, layout)
    band = GUARD_BYTES // tensor.element_size()
    # An offset that is no multiple of 16 bytes finds loads that take their alignment for granted.
    offset = band + {"padded": 3, "shifted": SHIFT_BYTES // tensor.element_size()}.get(layout, 0)
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, stride, strict=True))
    num_bytes = (offset + span + band) * tensor.element_size()
    num_bytes += -num_bytes % 16
    buffer = torch.full((num_bytes,), NAN_BYTE, dtype=torch.uint8, device=tensor.device)
    view = buffer.view(tensor.dtype).as_strided(tensor.shape, stride, offset)
    view.copy_(tensor)
    return Placed(view, buffer, buffer.clone())


def _strides(shape: Shape, layout: str) -> Shape:
    if layout == "transposed" and len(shape) == 1:
        return (2,)
    order = list(range(len(shape))) if layout == "transposed" else list(range(len(shape)))[::-1]
    if layout == "permuted":
        # Columns side by side; of the dimensions before them, the first one is the innermost.
        order = [order[0], *order[:0:-1]] if order else order
    strides, step = [0] * len(shape), 2 if layout == "strided" else 1
    for dimension in order:
        strides[dimension] = step
        step *= shape[dimension]
        if layout == "padded":
            step += 5
    return tuple(strides)


def _place_expanded(tensor: Tensor) -> Placed:
    """Lay out the first row alone, and let all others be at the same place."""
    row = place(tensor[:1], "contiguous")
    view = row.view.expand(tensor.shape)
    return Placed(view, row.buffer, row.before)


def _place_far(tensor: Tensor) -> Placed:
    """Lay the first dimension's entries so far apart that 32 bits do not reach the last one.

    Only what is touched takes memory on a CPU; a GPU takes all of it.
    """
    if tensor.dim() < 2 or tensor.shape[0] < 2:
        return place(tensor, "contiguous")
    inner = torch.empty(tensor.shape[1:], device="meta").stride()
    step = FAR_ELEMENTS // (tensor.shape[0] - 1) + 64
    total = step * (tensor.shape[0] - 1) + tensor[0].numel()
    buffer = torch.empty(total, dtype=tensor.dtype, device=tensor.device)
    view = buffer.as_strided(tensor.shape, (step, *inner), 0)
    view.copy_(tensor)
    return Placed(view, None, None)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the tensor's bits, in which NaN equals itself and -0 is not 0."""
    dense = tensor.detach().clone(memory_format=torch.contiguous_format)
    return dense.reshape(-1).view(torch.uint8)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors have the same shape, dtype and bits."""
    return not bool(are_other_bits(one, other))


def are_other_bits(one: Tensor, other: Tensor) -> Tensor:
    """Tell, on their device, whether two tensors differ in shape, dtype or any bit."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return torch.tensor(True)
    return (bytes_of(one) != bytes_of(other)).any()


def read(scalars: Sequence[Tensor]) -> list[float]:
    """Return the values of tensors without dimensions; a GPU is waited for once."""
    away = [one.double() for one in scalars if one.device.type != "cpu"]
    found = iter(torch.stack(away).tolist() if away else [])
    return [float(one) if one.device.type == "cpu" else next(found) for one in scalars]


def edge_shapes(subject: Subject) -> list[Shape]:
    """Return the subject's first shape with each free dimension at its edges.

    One, one off the size itself, and one off the largest power of two below it: a tile's borders.
    """
    first = subject.shapes[0]
    found = []
    for dimension in subject.free:
        size = first[dimension]
        tile = 1 << (max(size, 1).bit_length() - 1)
        sizes = {1, size - 1, size + 1, tile - 1, tile + 1} - {size}
        for n in sorted(n for n in sizes if n > 0):
            found.append((*first[:dimension], n, *first[dimension + 1 :]))
    return list(dict.fromkeys(found))


def empty_shape(subject: Subject) -> Shape | None:
    """Return the first shape without any row, None where no dimension is free."""
    if not subject.free:
        return None
    empty = list(subject.shapes[0])
    empty[subject.free[0]] = 0
    return tuple(empty)


def bulk_cases(subject: Subject, dtype: str, takes_more: Callable[[], bool]) -> Iterator[Case]:
    """Yield cases without end: all distributions in turn, over the shapes, with new seeds.

    Once every shape was in every layout, each round has twice the rows of the one before, as long
    as `takes_more` says that such calls are taken.
    """
    layouts = _statistical(subject)
    num_given = math.lcm(len(subject.shapes), len(layouts))
    seed = 0
    while True:
        shape = subject.shapes[seed % len(subject.shapes)]
        for name in pooled(subject):
            more = max(seed - num_given + 1, 0) if takes_more() else 0
            layout = layouts[seed % len(layouts)]
            yield Case(_with_rows(subject, shape, more), dtype, name, layout, seed)
        seed += 1


def _with_rows(subject: Subject, shape: Shape, doublings: int) -> Shape:
    """Return a shape with its first free dimension so often doubled, as far as it may grow."""
    if not (doublings and subject.free) or subject.differentiable:
        # The gradient of a weight sums over rows: with many, code in 16 bits has no digit left.
        return shape
    dimension = subject.free[0]
    most = subject.reach[dimension] if dimension < len(subject.reach) else 0
    each = max(math.prod(n for n in shape if n) // max(shape[dimension], 1), 1)
    size = min(shape[dimension] << doublings, most or ROWS, POOLED_ELEMENTS // each)
    return (*shape[:dimension], max(size, shape[dimension]), *shape[dimension + 1 :])


def edge_cases(subject: Subject, dtype: str) -> Iterator[Case]:
    """Yield every edge shape in all distributions but those of nothing and of no number."""
    names = [name for name in pooled(subject) if name != "zeros"]
    layouts = _statistical(subject)
    for number, shape in enumerate(edge_shapes(subject)):
        for i, name in enumerate(names):
            yield Case(shape, dtype, name, layouts[(number + i) % len(layouts)], 1000 + i)


def far_case(subject: Subject, dtype: str) -> Case | None:
    """Return the case whose rows lie so far apart that 32 bits do not reach, if there is room."""
    if "far" not in subject.layouts or not has_room_for_far(subject, dtype):
        return None
    first = Case(subject.shapes[0], dtype, "normal", "far", 2000)
    small = replace(first, shape=(min(first.shape[0], 3), *first.shape[1:]))
    return small if 0 in subject.free else first


def pooled(subject: Subject) -> list[str]:
    """Return the distributions whose errors are pooled.

    Values of one sign alone are looked at beyond any rounding: a sign that is lost is far from it.
    """
    return [name for name in subject.distributions if name not in ("nonfinite", "negative")]


def _statistical(subject: Subject) -> list[str]:
    """Return the layouts in which rows are drawn one by one, as a count of their errors assumes."""
    return [name for name in subject.layouts if name not in ("far", "expanded")]


def has_room_for_far(subject: Subject, dtype: str) -> bool:
    """Tell whether every argument can be laid out far: on a GPU in real memory, else in virtual."""
    drawn = subject.inputs(subject.shapes[0], Draw(Case(subject.shapes[0], dtype), subject))
    sizes = [a.element_size() for a in drawn if isinstance(a, Tensor) and a.dim() > 1]
    if subject.device.startswith("cuda"):
        # Half as much again, for results and for the blocks that the allocator rounds up.
        return bool(torch.cuda.mem_get_info()[0] > 1.5 * FAR_ELEMENTS * sum(sizes))
    try:
        torch.empty((FAR_ELEMENTS + 2**20) * max(sizes, default=0), dtype=torch.uint8)
    except RuntimeError:
        return False
    return True
