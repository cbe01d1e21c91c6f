"""Batch invariance: does a row's result depend on the rows around it?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from kprof.gate.inputs import bytes_of
from kprof.gate.observe import draw, observe
from kprof.gate.result import Measure
from kprof.gate.subject import Case, Function, Subject


@dataclass(frozen=True)
class VariantRows:
    """How many rows got other bits when they stood alone, of how many."""

    new: int
    replaced: int
    num_rows: int
    is_claimed: bool

    def measures(self) -> Iterator[Measure]:
        """Yield a measure where invariance is claimed; else it is only reported."""
        if self.is_claimed:
            yield Measure(
                "rows that depend on their neighbours", self.new, 0, self.replaced, "rows"
            )

    def sentence(self) -> str:
        """Say what was measured."""
        return (
            f"batch invariance: {self.new} of {self.num_rows} rows get other bits in a smaller "
            f"batch, {self.replaced} in the replaced code"
        )


def count_variant_rows(subject: Subject, cases: Sequence[Case]) -> VariantRows | None:
    """Compare each of the first rows in the full batch, in half of it, and alone.

    None where the subject does not say which arguments have rows.
    """
    if not subject.rows:
        return None
    plain = [c for c in cases if c.layout == "contiguous" and c.distribution != "nonfinite"]
    counts = {"new": 0, "replaced": 0}
    num_rows = 0
    for case in (case for case in plain if case.shape[0] > 1):
        sizes = (case.shape[0] // 2, 1)
        num_rows += sum(sizes)
        for arm, function in (("new", subject.new), ("replaced", subject.replaced)):
            counts[arm] += sum(_count(subject, function, case, size) for size in sizes)
    return VariantRows(counts["new"], counts["replaced"], num_rows, subject.is_batch_invariant)


def _count(subject: Subject, function: Function, case: Case, size: int) -> int:
    """Return how many of the first `size` rows differ when only they are given."""
    forward = replace(subject, differentiable=())
    arguments = draw(subject, case)
    cut = tuple(a[:size].clone() if i in subject.rows else a for i, a in enumerate(arguments))
    whole = observe(function, forward, case, arguments).results
    part = observe(function, forward, case, cut).results
    differing = torch.zeros(size, dtype=torch.bool)
    for name, result in part.items():
        if result.dim() and result.shape[0] == size:
            other = whole.get(name)
            if not result.numel():
                continue
            if other is None or other.dtype != result.dtype:
                differing[:] = True
                continue
            one, two = (bytes_of(each).view(size, -1) for each in (result, other[:size]))
            differing |= (one != two).any(1).cpu()
    return int(differing.sum())
