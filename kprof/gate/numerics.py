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

import torch
from torch import Tensor

from kprof.gate.deviation import (
    Errors,
    Pool,
    error_where_mended,
    errors_of,
    has_other_kinds,
    is_noise,
    measure_l2,
    measure_maximum,
    measure_percentile,
    root_mean_square,
    vanishes,
)
from kprof.gate.inputs import bulk_cases, edge_cases, has_room_for_far, pooled, same_bits
from kprof.gate.observe import GRADIENT, Observed, draw, observe, observe_truth
from kprof.gate.result import Level, Measure, judge, not_run
from kprof.gate.subject import DISTRIBUTIONS, Case, Subject

ENOUGH_VALUES = 1_000_000
UNSTATED_ERROR = 0.1
"""Relative, of a lower precision that states none: enough to tell it from another result."""
MENDED_WRONG = "is wrong where the replaced code has no number"
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
        for case in bulk_cases(subject, dtype):
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

    def look_at(self, case: Case, group: str) -> None:
        """Run both implementations and the truth on a case, and add their errors."""
        if group in DISTRIBUTIONS:
            self._looks[case.dtype] += 1
        arguments = draw(self.subject, case)
        # Where arguments lie is for the new code to cope with: torch's own products end the whole
        # process where 32 bits do not reach.
        at_hand = replace(case, layout="contiguous") if case.layout == "far" else case
        replaced = observe(self.subject.replaced, self.subject, at_hand, arguments)
        if replaced.raised is not None or replaced.faults:
            self.num_refused += 1
            return
        new = observe(self.subject.new, self.subject, case, arguments)
        self.num_cases += 1
        fault = find_mismatch(new, replaced)
        if fault:
            self.faults.append(f"{fault} ({case})")
            return
        truths = observe_truth(self.subject, case, arguments)
        largest = largest_gradient(truths)
        for name, truth in truths.items():
            one, other = new.results[name], replaced.results[name]
            if name.startswith(GRADIENT) and vanishes(truth, largest):
                if not is_noise(one, other, largest):
                    self.faults.append(f"{name} should vanish ({case})")
            elif error_where_mended(one, other, truth) > UNSTATED_ERROR:
                self.faults.append(f"{name} {MENDED_WRONG} ({case})")
            else:
                self._add(name, case.dtype, group, one, other, truth)

    def _add(
        self, name: str, dtype: str, group: str, new: Tensor, replaced: Tensor, truth: Tensor
    ) -> None:
        self.num_different += not same_bits(new, replaced)
        self.num_values += truth.numel()
        pool = self.pools[name, dtype].setdefault(group, Pool(replaced.dtype))
        pool.add(errors_of(new, replaced, truth, is_gradient=name.startswith(GRADIENT)))

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
        for dtype in self.subject.dtypes:
            if "far" in self.subject.layouts and not has_room_for_far(self.subject, dtype):
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
    mismatch = find_mismatch(new, replaced)
    if mismatch:
        return mismatch
    largest = largest_gradient(truth)
    for name, exact in truth.items():
        one = new.results[name]
        other = replaced.results.get(name, exact.to(one.dtype))
        if has_other_kinds(one, other, exact):
            return f"{name} has NaN or infinity, or hides it, where the replaced code does not"
        if name.startswith(GRADIENT) and vanishes(exact, largest):
            if not is_noise(one, other, largest):
                return f"{name} should vanish"
            continue
        if error_where_mended(one, other, exact) > UNSTATED_ERROR:
            return f"{name} {MENDED_WRONG}"
        errors = errors_of(one, other, exact, is_gradient=name.startswith(GRADIENT))
        measure = _measure_one(subject, name, errors, other.dtype)
        if not math.isfinite(measure.value) or measure.value > GROSS * measure.threshold:
            return f"{name} is wrong by {measure.value:.3g} {measure.unit}".rstrip()
    return None


def _measure_one(subject: Subject, name: str, errors: Errors, dtype: torch.dtype) -> Measure:
    pool = Pool(dtype)
    pool.add(errors)
    if subject.precision == "lower":
        return measure_l2(name, "", pool, stated=subject.stated_error or UNSTATED_ERROR)
    return measure_maximum(name, "", pool) if pool.has_digits else measure_l2(name, "", pool)


def largest_gradient(truths: Mapping[str, Tensor]) -> float:
    """Return the largest RMS, of what is finite, among the true gradients of one call."""
    gradients = (truth for name, truth in truths.items() if name.startswith(GRADIENT))
    return max((root_mean_square(one[one.isfinite()]) for one in gradients), default=0.0)


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
