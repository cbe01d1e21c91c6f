"""Which provider runs: the fastest of those that pass the gate, as measured on this GPU.

A choice holds for a GPU, the versions that were measured, a dtype, a bucket of shapes, and one of
the two passes that users pay for.
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

# Training: a forward and a backward pass, with all gradients.
Pass = Literal["forward", "backward", "training"]
# Within this, the one that costs the host less is taken.
ALIKE = 0.01
FALLBACK = "eager"
# What users pay for: calls without gradients; with them, forward and backward pass as one, since a
# gradient may be made beside the result.
PASSES: tuple[Pass, ...] = ("forward", "training")


@dataclass(frozen=True)
class Timed:
    """One provider on one shape; what could not be measured is missing, `problem` says why."""

    kernel: str
    provider: str
    shape: Shape
    dtype: str
    direction: Pass
    gpu_ns: float | None = None
    spread: float | None = None
    """Interquartile range of the samples over their median."""
    host_ns: float | None = None
    """What a call takes the host, without gradient."""
    bytes_per_s: float | None = None
    share_of_copy: float | None = None
    """Rate over that of a copy of the same bytes."""
    flops_per_s: float | None = None
    """Useful ones."""
    extra_bytes: int | None = None
    """Most memory that one call holds beside its arguments, results included."""
    copy_ns: float | None = None
    """What that copy took."""
    is_in_graph: bool = True
    """Whether GPU time is that of a graph's replay; else of calls in a row, launches included."""
    problem: str = ""


@dataclass(frozen=True)
class Choice:
    """Who runs calls of one kernel in a bucket of shapes, and what that was decided on."""

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
    """The calls that the gate tried of who was chosen; None: an older kprof did not say."""

    @property
    def why(self) -> str:
        """A sentence: how much faster than the next, or that there was no other."""
        ranked = ranking(self.measured)
        if len(ranked) < 2 or ranked[0].gpu_ns is None or ranked[1].gpu_ns is None:
            return "no other provider could be measured"
        ratio = ranked[1].gpu_ns / ranked[0].gpu_ns
        return f"{ratio:.2f} times as fast as {ranked[1].provider}, the next"


def passes_of(kernel: Kernel) -> tuple[Pass, ...]:
    """Return the passes that are paid for: without gradients, and then with them if there are."""
    return PASSES[:1] if kernel.backward_work is None else PASSES


def bucket_of(kernel: Kernel, shape: Shape) -> Shape:
    """Return what calls are measured together: rows to the next power of two, columns as they are.

    Speed hardly depends on the exact number of rows; on that of columns it does, or on the last
    `exact` numbers of a shape. What counts as rows in one number is one, however many dimensions
    a call has; what the kernel's own shapes tell apart, such as batch, heads and keys, stays apart.
    """
    shape = counted(kernel, shape)
    lengths, exact = shape[: -kernel.exact], shape[-kernel.exact :]
    return (*(1 << max(one - 1, 0).bit_length() for one in lengths), *exact)


def counted(kernel: Kernel, shape: Shape) -> Shape:
    """Return a shape with all that counts as rows in one number."""
    lengths, exact = shape[: -kernel.exact], shape[-kernel.exact :]
    if len(kernel.shapes[0]) <= kernel.exact + 1:
        lengths = (math.prod(lengths),)
    return (*lengths, *exact)


def why_beyond(kernel: Kernel, x: Tensor, shape: Shape, scope: Scope | None) -> str | None:
    """Return why a call is none of those that the gate tried; None: it is one, or any is.

    Args:
        kernel: Of the call; its `reach` is what the gate tries of our own providers.
        x: The call's first tensor.
        shape: As the kernel's bench counts shapes.
        scope: What the gate tried on this machine; None: nothing was measured here.
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
    """Return those that could be measured, the fastest first; among equals the cheapest call.

    Among equals whose calls cost the host nobody knows what, the fastest is first, too.
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
    """Return the choice that follows from measurements of one shape; they must not be empty."""
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
    """Return what was measured of a pass, with a problem for each who would win and fails the gate.

    Only who would win is judged.

    Args:
        measured: Of one pass and shape.
        why_rejected: Of a provider, a dtype and a pass, what the gate has against it; empty:
            nothing.
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
    """Return the installed version of every provider's package; those that are missing are not."""
    found = {}
    for name in sorted({provider.distribution for provider in providers}):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def file_of(gpu: str) -> Path | None:
    """Return where choices for this GPU are kept; None for a user without a home."""
    folder = cache_folder()
    name = "".join(c if c.isalnum() else "-" for c in gpu)
    return None if folder is None else folder / "kernels" / f"{name}.json"


def load_choices(gpu: str) -> list[Choice]:
    """Return what was chosen for this GPU before; a damaged file counts as none.

    So does what an older kprof chose for a backward pass alone, which nobody pays for.
    """
    path = file_of(gpu)
    try:
        found = msgspec.json.decode(path.read_bytes(), type=list[Choice]) if path else []
    except (OSError, msgspec.MsgspecError):
        return []
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
