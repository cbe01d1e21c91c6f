"""L1: is the new code's error, against the truth, no larger than that of the code it replaces?

For every result (outputs and gradients) and dtype, err(new) <= 1.05 * err(replaced) + half an ulp:

- in relative L2, for every distribution apart; for every edge shape, with four times as much;
- in the 99.99th percentile, pooled over at least a million values of all distributions;
- in the maximum, where four times the replaced code's and one ulp are allowed (at an edge shape
  16 times), in the same groups: one wrong element in a million moves neither of the others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kprof.gate.deviation import (
    Beside,
    Errors,
    Pool,
    compare,
    errors_of,
    measure_l2,
    measure_maximum,
    measure_percentile,
)
from kprof.gate.inputs import bulk_cases, edge_cases, far_case, pooled
from kprof.gate.memory import large_calls
from kprof.gate.observe import GRADIENT, Observed, Results, draw, gives_all, observe, observe_truth
from kprof.gate.result import Level, Measure, judge, not_run
from kprof.gate.subject import DISTRIBUTIONS, Case, Subject

ENOUGH_VALUES = 1_000_000
UNSTATED_ERROR = 0.1
"""Relative, of a lower precision that states none: enough to tell it from another result."""
WRONG_ALONE = "is wrong where the replaced code has no number"
_TELLING = tuple(name for name in DISTRIBUTIONS if name not in ("zeros", "negative", "nonfinite"))
"""Of nothing but zeros, and of what has no value, any code is right."""
GROSS = 4.0
"""A single call is called wrong from so many times the threshold on: the rest is L1's to judge."""


def check_numerics(subject: Subject) -> Level:
    """Compare the errors of both implementations against the truth (L1)."""
    if subject.precision == "lower" and subject.stated_error is None:
        return not_run("L1", "a lower precision is judged by the error it states: none is stated")
    survey = Survey(subject)
    for dtype in subject.dtypes:
        for case in edge_cases(subject, dtype):
            survey.look_at(case, group="x".join(map(str, case.shape)))
        survey.look_far(dtype)
        for case in bulk_cases(subject, dtype, survey.takes_more_rows):
            survey.look_at(case, group=case.distribution)
            if survey.has_enough(dtype):
                break
    if not survey.num_cases:
        return not_run("L1", "the replaced code takes none of the cases")
    from kprof.gate.variation import scope_of, try_beyond

    tried = try_beyond(subject)
    beyond = Measure(
        "right beyond the calls given",
        len(tried.faults),
        0,
        0,
        "faults",
        where="; ".join(tried.faults[:2]),
    )
    scope = scope_of(subject, tried)
    left_out = [f"outside its scope: {one}" for one in scope.left_out]
    level = judge(
        "L1",
        [*survey.measures(), beyond],
        f"{survey.num_cases + tried.num_cases} cases, {survey.num_values:,} values",
        notes=[*survey.notes(), *left_out],
        is_bit_exact=not survey.faults and survey.num_different + tried.num_different == 0,
    )
    level = replace(level, scope=scope)
    blank = survey.without_digits()
    if level.state == "passed" and blank and not level.is_bit_exact:
        why = f"{', '.join(blank)}: the replaced code has no correct digit in any distribution"
        return replace(level, state="undecided", why=f"{why}, so its errors allow anything")
    return level


class Survey:
    """What was seen of all cases so far."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.num_cases = self.num_values = self.num_different = self.num_refused = 0
        self.pools: dict[tuple[str, str], dict[str, Pool]] = defaultdict(dict)
        """For each result and dtype, a pool for every distribution and every edge shape."""
        self.faults: list[str] = []
        self._looks: dict[str, int] = defaultdict(int)
        self._takes_more_rows = True
        self._not_far: list[str] = []

    def takes_more_rows(self) -> bool:
        """Tell whether all calls with more rows than were given have been taken so far."""
        return self._takes_more_rows

    def has_enough(self, dtype: str) -> bool:
        """Tell whether the largest result has values enough, each distribution as often.

        Where cases give no result at all, one round of them is enough to say so.
        """
        names = pooled(self.subject)
        rounds, rest = divmod(self._looks[dtype], len(names))
        if rest or rounds < max(len(self.subject.shapes), len(self.subject.layouts)):
            return False
        sizes = [
            sum(one.numel() for name in names if name in groups for one in groups[name].new)
            for (_, d), groups in self.pools.items()
            if d == dtype
        ]
        most = max(sizes, default=0)
        return most >= self.subject.num_values or most == 0 or bool(self.faults)

    def look_far(self, dtype: str) -> None:
        """Look at rows so far apart that 32 bits do not reach, or note that there is no room."""
        if "far" not in self.subject.layouts:
            return
        with large_calls(self.subject.device):
            case = far_case(self.subject, dtype)
            try:
                if case is not None:
                    self.look_at(case, group="x".join(map(str, case.shape)))
                    return
            except torch.OutOfMemoryError:
                pass
        self._not_far.append(dtype)

    def look_at(self, case: Case, group: str) -> None:
        """Run both implementations and the truth on a case, and add their errors."""
        if group in DISTRIBUTIONS:
            self._looks[case.dtype] += 1
        arguments = draw(self.subject, case)
        standard = self._standard_of(case, arguments)
        if standard is None:
            self.num_refused += 1
            return
        replaced, truths = standard
        new = observe(self.subject.new, self.subject, case, arguments)
        if case.layout == "far" and isinstance(new.raised, torch.OutOfMemoryError):
            raise new.raised
        has_more_rows = group in DISTRIBUTIONS and case.shape not in self.subject.shapes
        if has_more_rows and new.raised is not None:
            # Its limits are in its scope.
            self._takes_more_rows = False
            return
        self.num_cases += 1
        fault = find_mismatch(new, replaced)
        if fault:
            self.faults.append(f"{fault} ({case})")
            return
        self._add_all(case, group, new, replaced, truths)

    def _standard_of(
        self, case: Case, arguments: tuple[Any, ...]
    ) -> tuple[Observed, Results] | None:
        """Return the replaced code's results and the truth; None: it does not take the call."""
        # Where arguments lie is for the new code to cope with: torch's own products end the whole
        # process where 32 bits do not reach.
        at_hand = replace(case, layout="contiguous") if case.layout == "far" else case
        replaced = observe(self.subject.replaced, self.subject, at_hand, arguments)
        if replaced.raised is not None or replaced.faults:
            return None
        truths = observe_truth(self.subject, case, arguments)
        return (replaced, truths) if gives_all(replaced, truths) else None

    def _add_all(
        self, case: Case, group: str, new: Observed, replaced: Observed, truths: Results
    ) -> None:
        """Add the errors of one call, or what is wrong with it whatever its errors."""
        beside = beside_all(new, replaced, truths)
        largest = largest_gradient(beside)
        for name, truth in truths.items():
            is_gradient = name.startswith(GRADIENT)
            if is_gradient and beside[name].vanishes(largest):
                if not beside[name].is_noise(largest):
                    self.faults.append(f"{name} should vanish ({case})")
            elif beside[name].error_where_fixed > UNSTATED_ERROR:
                self.faults.append(f"{name} {WRONG_ALONE} ({case})")
            else:
                self.num_different += beside[name].is_other_bits
                self.num_values += truth.numel()
                other = replaced.results[name]
                pool = self.pools[name, case.dtype].setdefault(group, Pool(other.dtype))
                pool.add(errors_of(new.results[name], other, truth, is_gradient=is_gradient))

    def measures(self) -> Iterator[Measure]:
        """Yield the measures: for each result and dtype the worst of every kind."""
        if self.faults:
            where = self.faults[0]
            yield Measure("cases without a result to compare", len(self.faults), 0, 0, where=where)
        stated = self.subject.stated_error
        for (name, dtype), groups in self.pools.items():
            title = f"{name}, {dtype}"
            yield _worst(
                measure_l2(title, g, pool, stated=stated, is_edge=g not in DISTRIBUTIONS)
                for g, pool in groups.items()
            )
            if stated is not None:
                continue
            pools = [pool for g, pool in groups.items() if g in DISTRIBUTIONS and pool.has_digits]
            yield from measure_percentile(title, pools)
            judged = {g: p for g, p in groups.items() if p.has_digits and p.has_scale}
            if judged:
                yield _worst(
                    measure_maximum(title, g, pool, is_edge=g not in DISTRIBUTIONS)
                    for g, pool in judged.items()
                )

    def without_digits(self) -> list[str]:
        """Return the results of which nothing was compared with a correct digit."""
        if self.subject.stated_error is not None:
            return []
        return [
            f"{name}, {dtype}"
            for (name, dtype), groups in self.pools.items()
            if not any(groups[g].is_compared for g in _TELLING if g in groups)
        ]

    def notes(self) -> Iterator[str]:
        """Yield what could not be judged as the rest."""
        if self.subject.num_values < ENOUGH_VALUES:
            yield f"pools {self.subject.num_values:,} values where {ENOUGH_VALUES:,} are due"
        for dtype in self._not_far:
            yield f"{dtype}: no memory for offsets beyond 32 bits, which were not looked at"
        if self.num_refused:
            yield f"the replaced code refuses or spoils {self.num_refused} cases"
        for (name, dtype), groups in self.pools.items():
            for group, pool in groups.items():
                if not pool.has_digits:
                    yield f"{name}, {dtype}, {group}: the replaced code has no correct digit"


def _worst(measures: Iterable[Measure]) -> Measure:
    return max(measures, key=lambda measure: measure.strain)


def find_wrong(
    subject: Subject, new: Observed, replaced: Observed, truth: Mapping[str, Tensor]
) -> str | None:
    """Return what is wrong with one call's results, None where nothing is.

    The rule is that of the largest error, with what one call has (of a lower precision, that of
    the error it states); NaN and infinity must stand where the replaced code or the truth has them.
    Where the replaced code itself does what it should not, its results count for nothing: the
    truth, rounded, stands in for them.
    """
    mismatch = find_mismatch(new, replaced) or _find_missing(new, truth)
    if mismatch:
        return mismatch
    standard = {n: replaced.results.get(n, t.to(new.results[n].dtype)) for n, t in truth.items()}
    beside = beside_all(new, Observed(standard), truth)
    largest = largest_gradient(beside)
    for name, exact in truth.items():
        one, other, found = new.results[name], standard[name], beside[name]
        if found.has_other_kinds:
            return f"{name} has NaN or infinity, or hides it, where the replaced code does not"
        if name.startswith(GRADIENT) and found.vanishes(largest):
            if not found.is_noise(largest):
                return f"{name} should vanish"
            continue
        if found.error_where_fixed > UNSTATED_ERROR:
            return f"{name} {WRONG_ALONE}"
        errors = errors_of(one, other, exact, is_gradient=name.startswith(GRADIENT))
        measure = _measure_one(subject, name, errors, other.dtype)
        if not math.isfinite(measure.value) or measure.value > GROSS * measure.threshold:
            return f"{name} is wrong by {measure.value:.3g} {measure.unit}".rstrip()
    return None


def _find_missing(new: Observed, truth: Mapping[str, Tensor]) -> str | None:
    return next((f"gives no {name}" for name in truth if name not in new.results), None)


def _measure_one(subject: Subject, name: str, errors: Errors, dtype: torch.dtype) -> Measure:
    pool = Pool(dtype)
    pool.add(errors)
    if subject.precision == "lower":
        return measure_l2(name, "", pool, stated=subject.stated_error or UNSTATED_ERROR)
    return measure_maximum(name, "", pool) if pool.has_digits else measure_l2(name, "", pool)


def beside_all(
    new: Observed, replaced: Observed, truths: Mapping[str, Tensor]
) -> dict[str, Beside]:
    """Return every result of one call beside the replaced code's and the truth."""
    triples = [(new.results[name], replaced.results[name], t) for name, t in truths.items()]
    return dict(zip(truths, compare(triples), strict=True))


def largest_gradient(beside: Mapping[str, Beside]) -> float:
    """Return the largest RMS, of what is finite, among the true gradients of one call."""
    sizes = (one.finite_size for name, one in beside.items() if name.startswith(GRADIENT))
    return max(sizes, default=0.0)


def find_mismatch(new: Observed, replaced: Observed) -> str | None:
    """Return why two observations cannot be compared value by value, None where they can."""
    if new.raised is not None:
        return f"raises {type(new.raised).__name__}: {new.raised}"
    if new.faults:
        return new.faults[0]
    for name, result in replaced.results.items():
        other = new.results.get(name)
        if other is None:
            return f"gives no {name}"
        if other.shape != result.shape or other.dtype != result.dtype:
            given = f"{tuple(other.shape)} {other.dtype}"
            return f"{name} is {given}, not {tuple(result.shape)} {result.dtype}"
    return None
