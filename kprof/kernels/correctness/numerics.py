"""L1: is the new code's error, against the truth, no larger than that of the code it replaces?

For every result (outputs and gradients) and dtype, err(new) <= 1.05 * err(replaced) + half an ulp:

- in relative L2, for every distribution apart; for every edge shape, with four times as much;
- in the 99.99th percentile, pooled over at least a million values of all distributions;
- in the maximum, where four times the replaced code's and one ulp are allowed (at an edge shape
  16 times), in the same groups: one wrong element in a million moves neither of the others.

Errors count in ulps of the larger of the true value and a scale around it: next to a zero that
cancellation made, any implementation is wrong by thousands of its own ulps. The scale of an output
is the RMS of its row (of all of it, where rows are short); of a gradient, of which whole rows may
be nothing but cancellation (those of a softmax that is one-hot), it is the RMS of all of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kprof.kernels.correctness.inputs import (
    are_other_bits,
    bulk_cases,
    edge_cases,
    far_case,
    pooled,
    read,
)
from kprof.kernels.correctness.levels import Level, Measure, judge, not_run
from kprof.kernels.correctness.memory import large_calls
from kprof.kernels.correctness.observe import (
    GRADIENT,
    Observed,
    Results,
    draw,
    gives_all,
    observe,
    observe_truth,
)
from kprof.kernels.correctness.subject import DISTRIBUTIONS, Case, Subject

SLACK = 1.05
EDGE_SLACK = 4.0
"""At an edge shape, with its few rows: what is wrong there is wrong by far more."""
MAX_SLACK = 4.0
"""Extremes of equal implementations differ by as much; a wrong value by hundreds of ulps."""
PERCENTILE = 99.99
LEAST_ABOVE = 100
"""Values that must lie above a percentile for it to mean anything."""
PRIOR_ROWS = 16.0
SURE = 5.0
MOST_CHANCE = 5.0
SHORT_ROW = 16
"""Rows shorter than this have no scale of their own: that of the whole result counts."""
VANISHING = 1e-10
"""A gradient so much smaller than the largest of its call is zero, but for float64's rounding."""
NO_DIGITS = 1 / 16
"""Relative error from which on the replaced code has no digits left that could be compared."""
NO_DIGITS_SLACK = 10.0
TINY = 1e-300


@dataclass(frozen=True)
class Errors:
    """Errors where a comparison means something, zero elsewhere, in float64."""

    new: Tensor
    replaced: Tensor
    truth: Tensor
    unit: Tensor
    """One ulp, for each value."""
    num_compared: Tensor
    """Values of which the replaced code gives a number."""


def errors_of(new: Tensor, replaced: Tensor, truth: Tensor, *, is_gradient: bool = False) -> Errors:
    """Return both errors against the truth; infinite where only the new result is not finite."""
    if not replaced.is_floating_point():
        same = torch.zeros(truth.shape, dtype=torch.float64, device=truth.device)
        one = torch.where(new == replaced, 0.0, math.inf).double()
        return Errors(one, same, truth.double(), torch.ones_like(same), torch.tensor(one.numel()))
    dtype = replaced.dtype
    # Eight-bit formats have no arithmetic of their own.
    new, replaced, rounded = new.double(), replaced.double(), truth.to(dtype).double()
    is_judged = rounded.isfinite() & replaced.isfinite()
    is_judged &= new.isfinite() | ~_is_near_the_largest(truth, dtype)
    truth = torch.where(is_judged, truth, 0.0)
    error = torch.where(is_judged, new - truth, 0.0)
    return Errors(
        torch.nan_to_num(error, nan=math.inf, posinf=math.inf, neginf=math.inf),
        torch.where(is_judged, replaced - truth, 0.0),
        truth,
        _ulps(truth, dtype, by_row=not is_gradient),
        is_judged.sum(),
    )


@dataclass(frozen=True)
class Beside:
    """One result beside the replaced code's and the truth, in numbers."""

    is_other_bits: bool
    has_other_kinds: bool
    """Whether NaN, inf or -inf stands where neither the replaced code nor the truth has it."""
    error_where_fixed: float
    """Relative error of the values of which the replaced code alone has no number."""
    true_size: float
    """RMS of the truth."""
    finite_size: float
    """RMS of what is finite in the truth."""
    noise: float
    """RMS of the new values, but for those of which neither implementation has a number."""
    replaced_noise: float
    """RMS of the replaced code's numbers."""
    half_of_the_digits: float

    def vanishes(self, largest: float) -> bool:
        """Tell whether a true gradient is zero by cancellation, beside the call's largest."""
        return self.true_size <= VANISHING * largest

    def is_noise(self, largest: float) -> bool:
        """Tell whether a gradient that should vanish is but rounding of what it was summed from.

        Where the replaced code has no number, the new code need not have one either.
        """
        allowed = max(self.half_of_the_digits * largest, NO_DIGITS_SLACK * self.replaced_noise)
        return self.noise <= allowed


def compare(triples: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[Beside]:
    """Return each new result beside the replaced code's and the truth; a GPU is waited for once."""
    columns = [_numbers_of(*triple) for triple in triples]
    numbers = read([one for column in columns for one in column])
    width = len(columns[0]) if columns else 1
    found = []
    for i, (_, replaced, truth) in enumerate(triples):
        other, kinds, error, true, finite, noise, own = numbers[i * width : (i + 1) * width]
        is_floating = replaced.is_floating_point()
        digits = math.sqrt(torch.finfo(replaced.dtype).eps) if is_floating else 0.0
        size = true if truth.numel() else math.inf
        found.append(Beside(bool(other), bool(kinds), error, size, finite, noise, own, digits))
    return found


def _numbers_of(new: Tensor, replaced: Tensor, truth: Tensor) -> tuple[Tensor, ...]:
    is_other = are_other_bits(new, replaced)
    wide, standard, exact = new.double(), replaced.double(), truth.double()
    sizes = (_rms(exact), _rms(exact, exact.isfinite()))
    is_number = standard.isfinite()
    noise = (_rms(wide, is_number | wide.isfinite()), _rms(standard, is_number))
    if not replaced.is_floating_point():
        zero = torch.zeros((), device=exact.device)
        return is_other, zero, zero, *sizes, *noise
    rounded = truth.to(replaced.dtype).double()
    kind, usual, true = (_kinds(one) for one in (wide, standard, rounded))
    is_odd = (kind != usual) & (kind != true) & ~_is_near_the_largest(exact, replaced.dtype)
    is_fixed = ~is_number & wide.isfinite() & rounded.isfinite()
    wrong = _rms(wide - exact, is_fixed)
    error = torch.where(wrong > 0, wrong / _rms(exact, is_fixed).clamp(min=TINY), 0.0)
    return is_other, is_odd.any(), error, *sizes, *noise


def _rms(values: Tensor, where: Tensor | None = None) -> Tensor:
    """Return the root mean square; of no values it is zero."""
    squares = values.square()
    if where is None:
        return squares.mean().sqrt() if values.numel() else torch.zeros_like(squares.sum())
    total = torch.where(where, squares, 0.0).sum()
    return (total / where.sum().clamp(min=1)).sqrt()


def _kinds(wide: Tensor) -> Tensor:
    return wide.isnan() * 1 + wide.isposinf() * 2 + wide.isneginf() * 3


def _is_near_the_largest(truth: Tensor, dtype: torch.dtype) -> Tensor:
    """Tell where rounding decides between a large number and infinity."""
    # Of float8, magnitudes are not known everywhere.
    return truth.double().abs() > 0.98 * torch.finfo(dtype).max


def _ulps(truth: Tensor, dtype: torch.dtype, *, by_row: bool) -> Tensor:
    scale = truth.abs()
    if truth.dim() and truth.numel():
        squares = truth**2
        has_rows = by_row and truth.shape[-1] >= SHORT_ROW
        mean = squares.mean(-1, keepdim=True) if has_rows else squares.mean()
        scale = torch.maximum(scale, mean.sqrt())
    information = torch.finfo(dtype)
    _, exponent = torch.frexp(scale.clamp(min=information.tiny))
    return torch.ldexp(torch.full_like(scale, information.eps / 2), exponent)


@dataclass(frozen=True)
class Sums:
    """Sums of squared errors, and their largest in ulps."""

    new: float = 0.0
    replaced: float = 0.0
    truth: float = 0.0
    """Of the true values."""
    fourth_replaced: float = 0.0
    """Over rows (a vector is one) of the squared summed squares."""
    num_compared: float = 0.0
    largest_new: float = 0.0
    largest_replaced: float = 0.0

    def plus(self, other: Sums) -> Sums:
        """Return the sums over the cases of both."""
        return Sums(
            *(self.new + other.new, self.replaced + other.replaced, self.truth + other.truth),
            *(self.fourth_replaced + other.fourth_replaced,),
            *(self.num_compared + other.num_compared,),
            *(max(self.largest_new, other.largest_new),),
            *(max(self.largest_replaced, other.largest_replaced),),
        )


@dataclass
class Pool:
    """Errors of both implementations over the cases of one group, of one result and dtype."""

    dtype: torch.dtype
    new: list[Tensor] = field(default_factory=list)
    """Sizes of the errors in ulps, case by case; with `rows`, the row of each value."""
    replaced: list[Tensor] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    num_rows: int = 0
    sums: Sums = field(default_factory=lambda: Sums())
    unread: list[Tensor] = field(default_factory=list)
    """Sums of cases that are still on the device."""

    def add(self, errors: Errors) -> None:
        """Add the errors of one case."""
        squared = errors.replaced**2
        by_row = squared.sum(-1) if squared.dim() else squared
        # In float64: ulps next to a true zero are too many for float32.
        new, replaced = (
            (one / errors.unit).abs().reshape(-1) for one in (errors.new, errors.replaced)
        )
        largest = (one.max() if one.numel() else one.sum() for one in (new, replaced))
        numbers = (
            *((errors.new**2).sum(), squared.sum(), (errors.truth**2).sum(), (by_row**2).sum()),
            *(errors.num_compared.to(squared), *largest),
        )
        self.unread.append(torch.stack(numbers))
        self.new.append(new)
        self.replaced.append(replaced)
        length = max(squared.numel() // max(by_row.numel(), 1), 1)
        places = torch.arange(squared.numel(), device=squared.device)
        self.rows.append(places // length + self.num_rows)
        self.num_rows += by_row.numel()

    def read(self) -> Sums:
        """Return the sums over all cases; a GPU is waited for once."""
        if self.unread:
            cases = torch.stack(self.unread).tolist()
            self.unread.clear()
            for case in cases:
                self.sums = self.sums.plus(Sums(*case))
        return self.sums

    @property
    def relative_new(self) -> float:
        """The new code's relative L2 error."""
        return self._relative(self.read().new)

    @property
    def relative_replaced(self) -> float:
        """The replaced code's relative L2 error."""
        return self._relative(self.read().replaced)

    def _relative(self, squared: float) -> float:
        # Of nothing but true zeros the replaced code's error is the only scale.
        scale = self.read().truth or self.read().replaced
        if scale == 0:
            return 0.0 if squared == 0 else math.inf
        return math.sqrt(squared / scale)

    @property
    def has_digits(self) -> bool:
        """Whether the replaced code's results are more than rounding."""
        return self.relative_replaced < NO_DIGITS

    @property
    def is_compared(self) -> bool:
        """Whether the replaced code has digits to compare with, of half of the values at least."""
        num_values = sum(one.numel() for one in self.new)
        return self.has_digits and 2 * self.read().num_compared >= num_values

    @property
    def sampling(self) -> float:
        """By which factor the error of an equal implementation may exceed this one by chance.

        The values of a row share what went wrong with it, so rows are what is drawn: by how much
        the replaced code's rows differ in their squared error says how sure its sum is, and five
        standard deviations of the ratio of two such root mean squares are allowed (errors have
        longer tails than normal numbers). With hundreds of rows alike that is 2 to 4 %; a scalar
        loss, or a few rows that are most of the error, get more, five times at most. Of few rows
        the differences say little, so a wide spread is taken for granted.
        """
        sums = self.read()
        if sums.fourth_replaced == 0:
            return 1.0
        variance = self.num_rows * sums.fourth_replaced / sums.replaced**2 - 1
        variance = max(variance, 0.0) + PRIOR_ROWS / self.num_rows
        factor = math.exp(SURE * math.sqrt(variance / (2 * self.num_rows)))
        return min(factor, MOST_CHANCE)

    @property
    def has_scale(self) -> bool:
        """Whether the results are large enough for their RMS to be a scale for each value."""
        num_values = sum(one.numel() for one in self.new)
        return bool(num_values >= SHORT_ROW * len(self.new))


def measure_l2(
    title: str, group: str, pool: Pool, *, stated: float | None = None, is_edge: bool = False
) -> Measure:
    """Return the relative L2 error beside what it may be; half an ulp is half of epsilon."""
    replaced = pool.relative_replaced
    half_ulp = float(torch.finfo(pool.dtype).eps) / 2 if pool.dtype.is_floating_point else 0.0
    slack = (EDGE_SLACK if is_edge else SLACK) * pool.sampling
    slack = slack if pool.has_digits else NO_DIGITS_SLACK
    threshold = slack * replaced + half_ulp if stated is None else stated
    name = f"{title}: relative L2 error"
    return Measure(name, pool.relative_new, threshold, replaced, where=group)


def measure_maximum(title: str, group: str, pool: Pool, *, is_edge: bool = False) -> Measure:
    """Return the largest error beside what it may be: one wrong value in a million shows here."""
    value, baseline = pool.read().largest_new, pool.read().largest_replaced
    slack = MAX_SLACK * (EDGE_SLACK if is_edge else 1.0)
    threshold = slack * baseline * pool.sampling + 1
    return Measure(f"{title}: largest error", value, threshold, baseline, "ulp", where=group)


def measure_percentile(title: str, pools: list[Pool]) -> Iterator[Measure]:
    """Yield the 99.99th percentile over all pools, or the largest that so few values have."""
    new = torch.cat([one for pool in pools for one in pool.new] or [torch.empty(0)])
    above = max(round(new.numel() * (1 - PERCENTILE / 100)), LEAST_ABOVE)
    if new.numel() < 10 * above:
        return
    replaced = torch.cat([one for pool in pools for one in pool.replaced])
    value = float(new.topk(above).values[-1])
    largest = replaced.topk(above)
    # A percentile is as sure as the rows are many that lie above it: its upper bound, three
    # standard deviations of the difference of two counts away, is what may be reached by chance.
    num_rows = len(_row_numbers(pools)[largest.indices].unique())
    rank = max(1, int(above * (1 - 3 * math.sqrt(2 / num_rows))))
    bound = float(largest.values[rank - 1])
    percentile = 100 * (1 - above / new.numel())
    name = f"{title}: {percentile:.4g}th percentile"
    baseline = float(largest.values[-1])
    where = f"{new.numel():,} values"
    yield Measure(name, value, SLACK * bound + 0.5, baseline, "ulp", where=where)


def _row_numbers(pools: list[Pool]) -> Tensor:
    numbers, start = [], 0
    for pool in pools:
        numbers += [rows + start for rows in pool.rows]
        start += pool.num_rows
    return torch.cat(numbers)


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
    from kprof.kernels.correctness.variation import scope_of, try_beyond

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
        """Add the errors of one call, or a fault that no error measures."""
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
