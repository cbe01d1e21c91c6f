"""Calls beyond the given ones: other modes of torch, numbers of dimensions, larger sizes.

Results must be right beyond any rounding wherever the replaced code takes such a call. A call that
the new code refuses, by its declared limits or by raising, is left out of the scope; one that it
takes and gets wrong fails.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kprof.kernels.correctness.inputs import ROWS, SHIFT_BYTES, are_other_bits, read
from kprof.kernels.correctness.memory import large_calls
from kprof.kernels.correctness.numerics import find_mismatch, find_wrong
from kprof.kernels.correctness.observe import (
    Observed,
    Results,
    draw,
    gives_all,
    in_context,
    observe,
    observe_truth,
    require_gradients,
)
from kprof.kernels.correctness.scope import Scope, Size, names_of_dimensions
from kprof.kernels.correctness.subject import Case, Shape, Subject

COLUMNS = 2**13
"""Size that every free dimension but the first grows to where no `reach` is given."""
STEP = 8
"""From one size to the next, twice that to the last; one more makes it a multiple of no tile."""
FEW = 17
"""Size of the other free dimensions while one grows."""
GROWTH_BYTES = {"cpu": 2**26, "cuda": 2**29}
"""Of the arguments of the largest call."""
GROWTH_S = {"cpu": 2.0, "cuda": 10.0}
"""For one call; one that would take longer, by the size before it, is not made."""
LARGE_BYTES = 2**24
"""Of arguments, from which on processes that share a GPU take turns."""
SEED = 3000


@dataclass
class Tried:
    """What was tried beyond the given cases, and how it ended."""

    faults: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """What the new code refuses, with its reason."""
    contexts: set[str] = field(default_factory=set)
    num_dimensions: set[int] = field(default_factory=set)
    largest: dict[int, int] = field(default_factory=dict)
    """For every free dimension, up to which size it was right."""
    num_cases: int = 0
    num_different: int = 0
    """Results with other bits than those of the replaced code."""

    def add(self, other: Tried) -> None:
        """Add what was tried in another dtype: the scope is what was right in every one."""
        self.faults += other.faults
        self.left_out |= other.left_out
        self.contexts &= other.contexts
        self.num_dimensions &= other.num_dimensions
        self.largest = {
            dimension: min(size, other.largest.get(dimension, size))
            for dimension, size in self.largest.items()
        }
        self.num_cases += other.num_cases
        self.num_different += other.num_different


def try_beyond(subject: Subject) -> Tried:
    """Try what was not given, in every dtype."""
    tried = [_Trial(subject, dtype).run() for dtype in subject.dtypes]
    for other in tried[1:]:
        tried[0].add(other)
    return tried[0]


def scope_of(subject: Subject, tried: Tried) -> Scope:
    """Return the calls of which the gate can speak."""
    first = subject.shapes[0]
    names = names_of_dimensions(subject.dimensions, len(first))
    sizes = []
    for i, name in enumerate(names):
        known = sorted({shape[i] for shape in subject.shapes if len(shape) == len(first)})
        if i in subject.free:
            sizes.append(Size(name, tried.largest.get(i, known[-1])))
        else:
            sizes.append(Size(name, None, () if subject.refuses else tuple(known)))
    return Scope(
        sizes=tuple(sizes),
        # Any, of code that declares its limits and whose rows cannot be arranged otherwise.
        num_dimensions=tuple(sorted(tried.num_dimensions))
        if subject.rows or not subject.refuses
        else (),
        dtypes=subject.dtypes,
        layouts=tuple(one for one in subject.layouts if one != "far"),
        contexts=tuple(one for one in subject.contexts if one in tried.contexts),
        left_out=tuple(f"{what}: {why}" for what, why in tried.left_out.items()),
    )


class _Trial:
    """Tries one dtype."""

    def __init__(self, subject: Subject, dtype: str) -> None:
        self._subject = subject
        self._start = Case(subject.shapes[0], dtype, seed=SEED)
        self._tried = Tried()

    def run(self) -> Tried:
        """Try every mode, number of dimensions and size."""
        for context in self._subject.contexts:
            if self._looks_right(replace(self._start, context=context), context):
                self._tried.contexts.add(context)
        self._try_unpooled()
        if "gradient" in self._tried.contexts:
            self._tried.num_dimensions.add(_dimensions_of(self._subject, self._start))
        for case in self._other_dimensions():
            number = _dimensions_of(self._subject, case)
            what = "permuted dimensions" if case.layout == "permuted" else f"{number} dimensions"
            if self._looks_right(case, what):
                self._tried.num_dimensions.add(number)
        for dimension in self._subject.free:
            self._grow(dimension)
        return self._tried

    def _try_unpooled(self) -> None:
        """Look at the bits of the values and the layouts whose errors are not pooled."""
        if "negative" in self._subject.distributions:
            self._looks_right(replace(self._start, distribution="negative"), "negative values")
        if "expanded" in self._subject.layouts:
            self._looks_right(replace(self._start, layout="expanded"), "expanded rows")
        if len(self._subject.layouts) > 1:
            aligned = replace(self._start, layout="shifted")
            self._looks_right(aligned, f"alignment to {SHIFT_BYTES} bytes alone")

    def _looks_right(self, case: Case, what: str) -> bool:
        """Tell whether a call is right; note why it is not."""
        try:
            outcome = look_at(self._subject, case)
        except torch.OutOfMemoryError:
            outcome = Outcome(why_refused="there is no memory for the call here")
        if outcome.is_asked:
            self._tried.num_cases += 1
        if outcome.fault:
            self._tried.faults.append(f"{outcome.fault} ({case})")
        elif outcome.why_refused:
            self._tried.left_out.setdefault(what, outcome.why_refused)
        self._tried.num_different += outcome.num_different
        return outcome.is_right

    def _other_dimensions(self) -> Iterator[Case]:
        """Yield cases with the rows in none, two, three or four dimensions, and permuted ones."""
        if not self._subject.rows:
            return
        free = 0 in self._subject.free
        rows = self._start.shape[0]
        if free:
            rows += rows % 2
        even = replace(self._start, shape=(rows, *self._start.shape[1:]))
        half = (2, rows // 2) if rows % 2 == 0 else (1, rows)
        for leading in (half, (1, *half), (1, *half, 1)):
            yield replace(even, leading=leading)
        if len(self._subject.layouts) > 1:
            # A dimension of one has any stride there, and the tensor is contiguous all the same.
            yield replace(even, leading=half, layout="permuted")
            yield replace(even, leading=(rows, 1), layout="permuted")
        if free and _dimensions_of(self._subject, self._start) == 2:
            one = replace(self._start, shape=(1, *self._start.shape[1:]))
            yield replace(one, leading=())

    def _grow(self, dimension: int) -> None:
        """Make a dimension larger, as far as the budget goes and results are right."""
        subject = self._subject
        given = max(shape[dimension] for shape in subject.shapes if len(shape) > dimension)
        self._tried.largest[dimension] = given
        base, case = self._smallest(dimension), self._start
        device = "cuda" if subject.device.startswith("cuda") else "cpu"
        budget_s = GROWTH_S[device] if subject.growth_s is None else subject.growth_s
        bytes_each = self._bytes_each(base, dimension)
        name = names_of_dimensions(subject.dimensions, len(base))[dimension]
        small_s, took_s, last = 0.0, 0.0, 0
        for size in self._sizes(dimension, given):
            if bytes_each * size > GROWTH_BYTES[device] or not budget_s:
                return
            if last and took_s * size / last > budget_s and took_s < budget_s:
                # The first call of a size may compile, and every call has costs that don't grow.
                small_s = small_s or _seconds_of(subject, self._start)
                with _turns(subject, bytes_each * last):
                    took_s = _seconds_of(subject, case)
            if last and small_s + max(took_s - small_s, 0.0) * size / last > budget_s:
                return
            case = replace(case, shape=(*base[:dimension], size, *base[dimension + 1 :]))
            with _turns(subject, bytes_each * size):
                began_s = time.monotonic()
                is_right = self._looks_right(case, f"{size:,} {name}")
                took_s, last = time.monotonic() - began_s, size
            if not is_right:
                return
            self._tried.largest[dimension] = size

    def _bytes_each(self, base: Shape, dimension: int) -> float:
        """Return by how many bytes the arguments grow with each more in a dimension."""
        size = base[dimension]
        twice = (*base[:dimension], 2 * size, *base[dimension + 1 :])
        small, large = (
            _num_bytes(self._subject, replace(self._start, shape=one)) for one in (base, twice)
        )
        return (large - small) / max(size, 1)

    def _sizes(self, dimension: int, given: int) -> Iterator[int]:
        """Yield sizes beyond every given one, the last as large as is asked for."""
        reach = self._subject.reach
        wanted = reach[dimension] if dimension < len(reach) else 0
        usual = ROWS if dimension == self._subject.free[0] else COLUMNS
        end = max(wanted or usual, 2 * given)
        size = STEP * given + 1
        while 2 * size <= end:
            yield size
            size = STEP * size + 1
        if dimension != self._subject.free[0]:
            # A multiple of no tile; the rows before it were none either.
            yield end - end // 8 + 1
        yield end

    def _smallest(self, dimension: int) -> Shape:
        """Return the given shape with the fewest values, its other free dimensions made small."""
        length = len(self._subject.shapes[0])
        shapes = [shape for shape in self._subject.shapes if len(shape) == length]
        small = min(shapes, key=math.prod)
        others = set(self._subject.free) - {dimension}
        return tuple(min(n, FEW) if i in others else n for i, n in enumerate(small))


@dataclass(frozen=True)
class Outcome:
    """How one call ended."""

    is_asked: bool = True
    """Whether the replaced code takes the call, so that the new code has to."""
    why_refused: str = ""
    fault: str = ""
    num_different: int = 0

    @property
    def is_right(self) -> bool:
        """Whether the new code took the call and got it right."""
        return self.is_asked and not self.why_refused and not self.fault


def look_at(subject: Subject, case: Case) -> Outcome:
    """Make one call of both implementations, and compare what comes of it.

    Raises:
        torch.OutOfMemoryError: a GPU has no room for the call, which tells nothing of the code.
    """
    standard = _standard_of(subject, case)
    if standard is None:
        return Outcome(is_asked=False)
    arguments, replaced, truth = standard
    why = _why_declared(subject, case, arguments)
    if why:
        return Outcome(why_refused=why)
    new = observe(subject.new, subject, case, arguments)
    _raise_without_memory(new)
    if new.raised is not None:
        said = str(new.raised).splitlines() or [""]
        return Outcome(why_refused=f"raises {type(new.raised).__name__}: {said[0]}")
    if case.context == "autocast" and not new.faults:
        dtypes = {
            (new.results[name].dtype, one.dtype)
            for name, one in replaced.results.items()
            if name in new.results and new.results[name].dtype != one.dtype
        }
        if dtypes:
            given, wanted = dtypes.pop()
            return Outcome(why_refused=f"gives {given}, where the replaced code gives {wanted}")
    fault = find_mismatch(new, replaced) or find_wrong(subject, new, replaced, truth)
    if fault:
        return Outcome(fault=fault)
    pairs = ((new.results[name], one) for name, one in replaced.results.items())
    is_other = read([are_other_bits(one, other) for one, other in pairs])
    return Outcome(num_different=sum(map(bool, is_other)))


def _standard_of(subject: Subject, case: Case) -> tuple[tuple[Any, ...], Observed, Results] | None:
    """Return the arguments, the replaced code's results and the truth; None: it takes no such call.

    Raises:
        torch.OutOfMemoryError: a GPU has no room for the call.
    """
    try:
        arguments = draw(subject, case)
        replaced = observe(subject.replaced, subject, case, arguments)
        _raise_without_memory(replaced)
        truth = observe_truth(subject, case, arguments)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError):
        # Shapes that the inputs or the mathematics are not for.
        return None
    return (arguments, replaced, truth) if gives_all(replaced, truth) else None


def _raise_without_memory(observed: Observed) -> None:
    if isinstance(observed.raised, torch.OutOfMemoryError):
        raise observed.raised


def _turns(subject: Subject, num_bytes: float) -> AbstractContextManager[None]:
    """Return what lets one large call run at a time."""
    return large_calls(subject.device) if num_bytes > LARGE_BYTES else nullcontext()


def _seconds_of(subject: Subject, case: Case) -> float:
    """Return what a call takes that was made before."""
    began_s = time.monotonic()
    look_at(subject, case)
    return time.monotonic() - began_s


def _why_declared(subject: Subject, case: Case, arguments: tuple[object, ...]) -> str | None:
    """Return why the new code declares that it does not take such a call."""
    if subject.refuses is None:
        return None
    given = tuple(a.clone() if isinstance(a, Tensor) else a for a in arguments)
    require_gradients(given, subject)
    with in_context(case, subject.device):
        return subject.refuses(*given)


def _dimensions_of(subject: Subject, case: Case) -> int:
    arguments = draw(subject, case)
    return next((a.dim() for a in arguments if isinstance(a, Tensor)), 0)


def _num_bytes(subject: Subject, case: Case) -> int:
    arguments = draw(subject, case)
    return sum(a.numel() * a.element_size() for a in arguments if isinstance(a, Tensor))
