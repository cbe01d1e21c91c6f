"""The choice of a provider: the fastest of those that pass the gate, as measured on this GPU.

A choice holds for a GPU, the measured versions, a dtype, a bucket of shapes, and one pass: forward,
or training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import msgspec
from torch import Tensor

from kprof.kernels import Kernel, Provider, Shape
from kprof.kernels.correctness.scope import Scope, names_of_dimensions
from kprof.storage import cache_folder

# "training" is a forward and a backward pass, with all gradients.
Pass = Literal["forward", "backward", "training"]
# Relative difference of GPU times below which the provider with less host time is chosen.
ALIKE = 0.01
FALLBACK = "eager"
# Passes that choices are made for. Forward and backward are one pass, as a kernel may compute the
# gradient with the result.
PASSES: tuple[Pass, ...] = ("forward", "training")


@dataclass(frozen=True)
class Timed:
    """The times of one provider on one shape; None: not measured, and `problem` says why."""

    kernel: str
    provider: str
    shape: Shape
    dtype: str
    direction: Pass
    gpu_ns: float | None = None
    spread: float | None = None
    """Interquartile range of the samples over their median."""
    host_ns: float | None = None
    """Host time of a call, without gradient."""
    bytes_per_s: float | None = None
    share_of_copy: float | None = None
    """Rate divided by that of a copy of the same bytes."""
    flops_per_s: float | None = None
    """Useful FLOPs."""
    extra_bytes: int | None = None
    """Peak memory of one call, results included, arguments not."""
    copy_ns: float | None = None
    """Time of that copy."""
    is_in_graph: bool = True
    """Whether GPU time is of a graph replay; else of successive calls, launches included."""
    problem: str = ""


@dataclass(frozen=True)
class Choice:
    """The provider of one kernel for a bucket of shapes, and the measurements behind it."""

    kernel: str
    dtype: str
    bucket: Shape
    direction: str
    provider: str
    gpu: str
    date: str
    versions: dict[str, str]
    measured: tuple[Timed, ...]
    scope: Scope | None = None
    """Calls of the provider that the gate tried; None: an older kprof did not record them."""

    @property
    def why(self) -> str:
        """How much faster it is than the next provider, or that there was no other."""
        ranked = ranking(self.measured)
        if len(ranked) < 2 or ranked[0].gpu_ns is None or ranked[1].gpu_ns is None:
            return "no other provider could be measured"
        ratio = ranked[1].gpu_ns / ranked[0].gpu_ns
        return f"{ratio:.2f} times as fast as {ranked[1].provider}, the next"


def passes_of(kernel: Kernel) -> tuple[Pass, ...]:
    """Return the passes of a kernel: forward, and training if it has gradients."""
    return PASSES[:1] if kernel.backward_work is None else PASSES


def bucket_of(kernel: Kernel, shape: Shape) -> Shape:
    """Return the bucket of a shape: rows rounded up to a power of two, the last sizes as they are.

    Speed hardly depends on the exact number of rows, but on the last `exact` sizes of a shape.
    Leading dimensions count as rows in one number, except those that the kernel's shapes separate,
    such as batch, heads and keys.
    """
    shape = counted(kernel, shape)
    lengths, exact = shape[: -kernel.exact], shape[-kernel.exact :]
    return (*(1 << max(one - 1, 0).bit_length() for one in lengths), *exact)


def counted(kernel: Kernel, shape: Shape) -> Shape:
    """Return a shape with all rows in one number."""
    lengths, exact = shape[: -kernel.exact], shape[-kernel.exact :]
    if len(kernel.shapes[0]) <= kernel.exact + 1:
        lengths = (math.prod(lengths),)
    return (*lengths, *exact)


def why_beyond(kernel: Kernel, x: Tensor, shape: Shape, scope: Scope | None) -> str | None:
    """Return why a call is outside of the calls that the gate tried; None: it is not.

    Args:
        kernel: Of the call; its `reach` bounds the gate's shapes for our own providers.
        x: The call's first tensor.
        shape: As the kernel's bench counts shapes.
        scope: The gate's calls on this machine; None: no measurements here.
    """
    if not kernel.reach:
        return None
    sizes = counted(kernel, shape)
    names = names_of_dimensions((), len(sizes))
    for name, length, most in zip(names, sizes, kernel.reach, strict=False):
        if length > most:
            return f"{length:,} {name}: the quality gate tried up to {most:,}"
    if scope is None or len(scope.sizes) != len(sizes):
        return None
    dtype = str(x.dtype).removeprefix("torch.")
    why = scope.why_outside(sizes, dtype, num_dimensions=x.dim())
    return f"outside of what the quality gate tried, {why}" if why else None


def ranking(measured: Iterable[Timed]) -> list[Timed]:
    """Return those that were measured, the fastest first; among equals, the least host time.

    Among equals without a host time, the fastest is first.
    """
    usable = [one for one in measured if one.gpu_ns is not None and not one.problem]
    if not usable:
        return []
    best_ns = min(one.gpu_ns for one in usable if one.gpu_ns is not None)

    def place(one: Timed) -> tuple[float, float, float]:
        assert one.gpu_ns is not None
        behind = one.gpu_ns / best_ns - 1
        host_ns = float("inf") if one.host_ns is None else one.host_ns
        return (0.0 if behind < ALIKE else behind, host_ns, behind)

    return sorted(usable, key=place)


def choose(kernel: Kernel, measured: Sequence[Timed], gpu: str, date: str) -> Choice:
    """Return the choice by measurements of one shape, at least one."""
    first = measured[0]
    ranked = ranking(measured)
    return Choice(
        kernel=kernel.name,
        dtype=first.dtype,
        bucket=bucket_of(kernel, first.shape),
        direction=first.direction,
        provider=ranked[0].provider if ranked else FALLBACK,
        gpu=gpu,
        date=date,
        versions=versions_of(kernel.providers),
        measured=tuple(measured),
    )


def without_rejected(
    measured: Sequence[Timed], why_rejected: Callable[[str, str, Pass], str]
) -> list[Timed]:
    """Return the measurements, with a problem for each fastest provider that fails the gate.

    Only the fastest provider is judged, and after a failure the next.

    Args:
        measured: Of one pass and shape.
        why_rejected: Takes provider, dtype and pass; returns why the gate fails; empty: it passes.
    """
    left = list(measured)
    while ranked := ranking(left):
        first = ranked[0]
        why = why_rejected(first.provider, first.dtype, first.direction)
        if not why:
            break
        left[left.index(first)] = replace(first, problem=f"fails the quality gate, {why}")
    return left


def versions_of(providers: Iterable[Provider]) -> dict[str, str]:
    """Return the versions of the providers' packages that are installed."""
    found = {}
    for name in sorted({provider.distribution for provider in providers}):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def file_of(gpu: str) -> Path | None:
    """Return the file of choices for this GPU; None for a user without a home."""
    folder = cache_folder()
    name = "".join(c if c.isalnum() else "-" for c in gpu)
    return None if folder is None else folder / "kernels" / f"{name}.json"


def load_choices(gpu: str) -> list[Choice]:
    """Return the stored choices for this GPU; a damaged file counts as none.

    Choices of an older kprof for a backward pass alone are ignored.
    """
    path = file_of(gpu)
    try:
        found = msgspec.json.decode(path.read_bytes(), type=list[Choice]) if path else []
    except (OSError, msgspec.MsgspecError):
        return []
    return [one for one in found if one.direction in PASSES]


def load_all_choices() -> list[Choice]:
    """Return the stored choices for every GPU; there is none for a user without a home."""
    folder = cache_folder()
    paths = sorted((folder / "kernels").glob("*.json")) if folder is not None else []
    found = []
    for path in paths:
        try:
            found += msgspec.json.decode(path.read_bytes(), type=list[Choice])
        except (OSError, msgspec.MsgspecError):
            continue
    return [one for one in found if one.direction in PASSES]


def keep(choice: Choice) -> Path | None:
    """Keep a choice in place of the former one for the same calls; return where."""
    path = file_of(choice.gpu)
    if path is None:
        return None
    others = [one for one in load_choices(choice.gpu) if _calls(one) != _calls(choice)]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    content = [asdict(one) for one in (*others, choice)]
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(content)))
    partial.replace(path)
    return path


def find_choice(
    kernel: Kernel, gpu: str, dtype: str, shape: Shape, direction: str = "forward"
) -> Choice | None:
    """Return the choice for such a call; None where none was made with the versions of today."""
    wanted = (kernel.name, dtype, bucket_of(kernel, shape), direction)
    for one in load_choices(gpu):
        if _calls(one) == wanted and one.versions == versions_of(kernel.providers):
            return one
    return None


def _calls(choice: Choice) -> tuple[str, str, Shape, str]:
    return (choice.kernel, choice.dtype, choice.bucket, choice.direction)
