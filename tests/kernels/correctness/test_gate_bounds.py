"""Every bound of the gate, from both sides: what lies just inside passes, just outside it fails."""

import math
from dataclasses import replace

import pytest
import torch

from kprof.kernels.correctness import (
    Case,
    Curve,
    Generation,
    Subject,
    integrity,
    isolation,
    variation,
)
from kprof.kernels.correctness.model_levels import (
    check_generation,
    check_layers,
    check_logits,
    check_task,
    check_training,
)
from kprof.kernels.correctness.numerics import (
    Pool,
    Survey,
    check_numerics,
    compare,
    errors_of,
    find_wrong,
    measure_l2,
    measure_maximum,
    measure_percentile,
)
from kprof.kernels.correctness.observe import Observed
from tests.quantities import quantities_in

JUST = pytest.mark.parametrize
EXACT = Subject(
    "ones doubled",
    replaced=lambda x: x * 2,
    new=lambda x: x * 2,
    truth=lambda x: x * 2,
    inputs=lambda shape, draw: (torch.ones(shape),),
    shapes=((20_000, 16),),
    free=(),
    dtypes=("float32",),
    distributions=("normal",),
    layouts=("contiguous",),
    contexts=("gradient",),
    num_values=1,
)


def scaled(by):
    return lambda x: x * (2 * (1 + by))


def pool_of(new, replaced=0.0, *, rows=100_000, columns=16, dtype=torch.float32):
    """Return a pool of ones with these relative errors, the same in every value."""
    truth = torch.ones(rows, columns, dtype=torch.float64)
    pool = Pool(dtype)
    errors = errors_of(truth + new, truth + replaced, truth)
    # The errors are given in float64: it is the ulp that a result of this dtype has.
    pool.add(replace(errors, unit=torch.full_like(errors.unit, torch.finfo(dtype).eps)))
    return pool


# L1


@JUST(("error", "state"), [(1.049e-3, "passed"), (1.053e-3, "failed")])
def test_the_error_may_be_five_percent_larger_than_the_replaced_codes(error, state):
    level = check_numerics(replace(EXACT, replaced=scaled(1e-3), new=scaled(error)))
    assert level.state == state


@JUST(("error", "is_met"), [(0.499, True), (0.501, False)])
@JUST("dtype", [torch.float32, torch.bfloat16])
def test_half_an_ulp_is_allowed_beside_an_exact_result(error, is_met, dtype):
    ulp = torch.finfo(dtype).eps
    pool = pool_of(error * ulp, dtype=dtype)
    (percentile,) = measure_percentile("output", [pool])
    assert measure_l2("output", "normal", pool).is_met is is_met
    assert percentile.is_met is is_met


@JUST(("error", "is_met"), [(1.049, True), (1.051, False)])
def test_the_percentile_may_be_five_percent_larger_beside_half_an_ulp(error, is_met):
    ulp = torch.finfo(torch.float32).eps
    pool = pool_of((1_000 * error + 0.5) * ulp, 1_000 * ulp)
    (percentile,) = measure_percentile("output", [pool])
    assert percentile.is_met is is_met


@JUST(("num_wrong", "is_met"), [(199, True), (200, False)])
def test_the_percentile_leaves_out_one_value_in_ten_thousand(num_wrong, is_met):
    truth = torch.ones(2_000_000, dtype=torch.float64)
    new = truth.clone()
    new[:num_wrong] += 1e-3
    pool = Pool(torch.float32)
    pool.add(errors_of(new, truth.float(), truth))
    (percentile,) = measure_percentile("output", [pool])
    assert percentile.name == "output: 99.99th percentile"
    assert percentile.is_met is is_met


@JUST(("rows", "values"), [(1_000, "1,000,000 values"), (999, "1,998,000 values")])
def test_a_million_values_are_pooled_at_least(rows, values):
    subject = replace(EXACT, shapes=((rows, 1_000),), num_values=Subject.num_values)
    assert values in check_numerics(subject).looked_at


@JUST(("num_values", "is_noted"), [(999_999, True), (1_000_000, False)])
def test_fewer_than_a_million_values_are_noted(num_values, is_noted):
    notes = check_numerics(replace(EXACT, num_values=num_values)).notes
    assert any("1,000,000" in quantities_in(note) for note in notes) is is_noted


@JUST(("error", "is_met"), [(4.99, True), (5.03, False)])
def test_the_largest_error_may_be_four_times_the_replaced_codes_and_an_ulp(error, is_met):
    ulp = torch.finfo(torch.float32).eps
    assert measure_maximum("output", "normal", pool_of(error * ulp, ulp)).is_met is is_met


@JUST(("error", "is_met"), [(16.99, True), (17.05, False)])
def test_at_an_edge_it_may_be_sixteen_times_as_large(error, is_met):
    ulp = torch.finfo(torch.float32).eps
    pool = pool_of(error * ulp, ulp)
    assert measure_maximum("output", "1x16", pool, is_edge=True).is_met is is_met


@JUST(("error", "is_met"), [(3.99e-3, True), (4.01e-3, False)])
def test_at_an_edge_the_relative_error_may_be_four_times_as_large(error, is_met):
    measure = measure_l2("output", "1x16", pool_of(error, 1e-3), is_edge=True)
    assert measure.is_met is is_met


@JUST(("group", "is_met"), [("normal", False), ("1x16", True)])
def test_only_a_shape_at_an_edge_has_the_larger_relative_error(group, is_met):
    survey = Survey(EXACT)
    survey.pools["output", "float32"] = {group: pool_of(3e-3, 1e-3)}
    assert next(survey.measures()).is_met is is_met


@JUST(("num_ulps", "is_wrong"), [(4, False), (5, True)])
def test_one_call_beside_an_exact_one_is_wrong_beyond_four_ulps(num_ulps, is_wrong):
    exact = torch.full((8, 16), 2.0)
    new = exact + num_ulps * 2**-22
    found = find_wrong(
        EXACT, Observed({"output": new}), Observed({"output": exact}), {"output": exact.double()}
    )
    assert (found is not None) is is_wrong


@JUST(("error", "is_wrong"), [(0.0399, False), (0.0401, True)])
def test_one_call_of_a_lower_precision_is_wrong_beyond_four_times_its_stated_error(error, is_wrong):
    exact = torch.ones(8, 16, dtype=torch.float64)
    subject = replace(EXACT, precision="lower", stated_error=0.01)
    results = [Observed({"output": one}) for one in (exact * (1 + error), exact)]
    found = find_wrong(subject, *results, {"output": exact})
    assert (found is not None) is is_wrong


@JUST(("error", "is_wrong"), [(0.099, False), (0.101, True)])
def test_one_call_is_wrong_beyond_a_tenth_where_the_replaced_code_has_no_number(error, is_wrong):
    exact = torch.ones(8, 16, dtype=torch.float64)
    new, replaced = exact.clone(), exact.clone()
    new[0, 0], replaced[0, 0] = 1 + error, math.nan
    results = [Observed({"output": one}) for one in (new, replaced)]
    found = find_wrong(EXACT, *results, {"output": exact})
    assert (found is not None) is is_wrong


@JUST(("error", "has_digits"), [(0.0624, True), (0.0626, False)])
def test_replaced_code_has_digits_below_an_error_of_a_sixteenth(error, has_digits):
    assert pool_of(0.0, error).has_digits is has_digits


@JUST(("error", "is_met"), [(0.99, True), (1.01, False)])
def test_without_digits_ten_times_the_replaced_codes_error_is_allowed(error, is_met):
    assert measure_l2("gradient of x", "large", pool_of(error, 0.1)).is_met is is_met


@JUST(("rows_wrong", "factor"), [(10_000, 1.0014152), (5_000, 1.0360171), (1, 5.0)])
def test_chance_is_five_deviations_of_rows_that_differ_as_the_replaced_codes_do(rows_wrong, factor):
    truth = torch.ones(10_000, 16, dtype=torch.float64)
    error = torch.zeros_like(truth)
    error[:rows_wrong] = 1e-3
    pool = Pool(torch.float32)
    pool.add(errors_of(truth, truth + error, truth))
    assert pool.sampling == pytest.approx(factor, abs=1e-6)


@JUST(("columns", "num_ulps"), [(16, 1), (15, 512)])
def test_a_row_of_sixteen_values_has_a_scale_of_its_own_and_a_shorter_one_not(columns, num_ulps):
    truth = torch.ones(2, columns, dtype=torch.float64)
    truth[1] = 1024
    errors = errors_of(truth.float(), truth.float(), truth)
    assert float(errors.unit[0, 0]) == num_ulps * 2**-23


@JUST(("num_values", "is_measured"), [(999, False), (1_000, True)])
def test_a_percentile_needs_a_hundred_values_above_it(num_values, is_measured):
    measures = list(measure_percentile("output", [pool_of(0.0, rows=num_values, columns=1)]))
    assert [one.name for one in measures] == ["output: 90th percentile"] * is_measured


@JUST(
    ("constant", "value"),
    [
        (variation.GROWTH_BYTES, {"cpu": 67_108_864, "cuda": 536_870_912}),
        (variation.GROWTH_S, {"cpu": 2.0, "cuda": 10.0}),
        (variation.ROWS, 65_536),
        (variation.COLUMNS, 8_192),
        (isolation.LEAST_KEPT, 4),
        (isolation.KEPT_BYTES, 67_108_864),
        (isolation.KEPT_NS, 1_000_000_000),
        (integrity.NUM_REPEATS, 4),
    ],
)
def test_the_budgets_are_those_that_are_documented(constant, value):
    assert constant == value


@JUST(("size", "is_zero"), [(0.99e-10, True), (1.01e-10, False)])
def test_a_gradient_vanishes_below_a_ten_billionth_of_the_largest(size, is_zero):
    truth = torch.full((4,), size, dtype=torch.float64)
    (beside,) = compare([(truth.float(), truth.float(), truth)])
    assert beside.vanishes(1.0) is is_zero


@JUST(("error", "state"), [(0.099, "passed"), (0.101, "failed")])
def test_where_the_replaced_code_has_no_number_ten_percent_are_allowed(error, state):
    def lost_at_first(x):
        out = x * 2
        out[0] = math.nan
        return out

    def found_at_first(x):
        out = x * 2
        out[0] *= 1 + error
        return out

    level = check_numerics(replace(EXACT, replaced=lost_at_first, new=found_at_first))
    assert level.state == state
    values = (2 * (1 + error), math.nan, 2.0)
    (beside,) = compare([tuple(torch.tensor([one]).double() for one in values)])
    assert beside.error_where_fixed == pytest.approx(error)


@JUST(("error", "state"), [(0.99e-2, "passed"), (1.01e-2, "failed")])
def test_a_lower_precision_may_err_as_much_as_it_states(error, state):
    lower = replace(EXACT, new=scaled(error), precision="lower", stated_error=1e-2)
    assert check_numerics(lower).state == state


def test_a_case_is_named_by_its_mode_and_the_dimensions_of_its_rows():
    case = Case((4, 8), "float32", context="no_grad", leading=(2, 2))
    assert str(case).split(", ") == [
        *("4x8 float32", "normal", "contiguous", "no_grad", "rows as 2x2", "seed 0"),
    ]


# L2


def stream(*values):
    return [torch.tensor([1.0, value], dtype=torch.float64) for value in values]


@JUST(("turned", "state"), [(0.99e-4, "passed"), (1.01e-4, "failed")])
def test_a_stream_may_turn_by_one_in_ten_thousand(turned, state):
    angle = math.acos(1 - turned)
    new = [torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)]
    level = check_layers(stream(0.0), stream(0.0), new, truth=stream(0.02))
    assert level.state == state


@JUST(("error", "state"), [(1.99e-3, "passed"), (2.01e-3, "failed")])
def test_a_streams_error_may_be_twice_the_replaced_codes(error, state):
    level = check_layers(stream(1e-3), stream(1e-3), stream(error), truth=stream(0.0))
    assert level.state == state


@JUST(("last", "is_met"), [(1.99e-3, True), (2.01e-3, False)])
def test_a_streams_error_may_not_grow_by_more_than_twice_over_the_layers(last, is_met):
    ones, new = [1e-3] * 3, [1e-3, 1e-3, last]
    level = check_layers(stream(*ones), stream(*ones), stream(*new), truth=stream(0.0, 0.0, 0.0))
    (growth,) = [one for one in level.measures if one.name == "growth over the layers"]
    assert growth.is_met is is_met


# L3


def logits(divergence, positions=1_000, flips=0):
    """Return logits of two tokens with this divergence from equal ones; some prefer the second."""
    gap = torch.full((positions,), math.acosh(math.exp(divergence)), dtype=torch.float64)
    gap[:flips] = -1e-6
    return torch.stack((gap, -gap), -1)


EVEN = logits(0.0)


@JUST(
    ("precision", "divergence", "state"),
    [
        ("same", 0.99e-4, "passed"),
        ("same", 1.01e-4, "failed"),
        ("lower", 0.99e-3, "passed"),
        ("lower", 1.01e-3, "failed"),
    ],
)
def test_the_mean_divergence_has_a_bound_for_each_precision(precision, divergence, state):
    assert check_logits(EVEN, EVEN, logits(divergence), precision=precision).state == state


@JUST(("divergence", "state"), [(1.99e-4, "passed"), (2.01e-4, "failed")])
def test_the_mean_divergence_may_be_twice_that_of_the_replaced_code(divergence, state):
    assert check_logits(EVEN, logits(1e-4), logits(divergence)).state == state


@JUST(("divergence", "state"), [(0.99e-2, "passed"), (1.01e-2, "failed")])
def test_the_divergence_of_one_position_in_a_thousand_has_a_bound(divergence, state):
    even, new = logits(0.0, 10_000), logits(0.0, 10_000)
    new[-20:] = logits(divergence, 20)
    assert check_logits(even, even, new).state == state


@JUST(
    ("precision", "own", "flips", "state"),
    [
        ("same", 0, 5, "passed"),
        ("same", 0, 6, "failed"),
        ("same", 10, 12, "passed"),
        ("same", 10, 13, "failed"),
        ("lower", 0, 10, "passed"),
        ("lower", 0, 11, "failed"),
    ],
)
def test_the_likeliest_token_may_differ_as_seldom_as_this(precision, own, flips, state):
    again, new = logits(0.0, flips=own), logits(0.0, flips=flips)
    assert check_logits(EVEN, again, new, precision=precision).state == state


@JUST(("positions", "state"), [(1_000, "passed"), (999, "not run")])
def test_a_thousand_positions_are_enough(positions, state):
    few = logits(0.0, positions)
    assert check_logits(few, few, few).state == state


# L4


def text(length, parts_at=None, margin=0.0):
    """Return a text of ones; from `parts_at` on, of twos that are so much likelier there."""
    tokens = [1] * length if parts_at is None else [1] * parts_at + [2] * (length - parts_at)
    seen = {1: -1.0, 2: -1.0 - margin} if parts_at is None else {1: -1.0 - margin, 2: -1.0}
    return Generation(tokens, [seen] * length)


@JUST(("margin", "state"), [(0.49, "passed"), (0.51, "failed")])
def test_texts_may_part_where_half_a_nat_decides(margin, state):
    one, new = [text(10, margin=margin)] * 20, [text(10, 3, margin)] * 20
    assert check_generation(one, one, new).state == state


@JUST(("length", "state"), [(110, "passed"), (111, "failed"), (90, "passed"), (89, "failed")])
def test_texts_may_be_a_tenth_longer_or_shorter(length, state):
    assert check_generation([text(100)] * 20, [text(100)] * 20, [text(length)] * 20).state == state


def parting(num):
    return [text(20, 5)] * num + [text(20)] * (20 - num)


@JUST(
    ("own", "num", "state"),
    [(8, 15, "passed"), (8, 16, "failed"), (5, 12, "passed"), (5, 13, "failed")],
)
def test_texts_part_too_early_where_chance_does_so_in_less_than_one_percent(own, num, state):
    level = check_generation([text(20)] * 20, parting(own), parting(num))
    assert level.state == state


@JUST(("own", "is_judged"), [(4, False), (5, True)])
def test_five_texts_of_the_replaced_code_must_part_for_a_comparison_of_where(own, is_judged):
    level = check_generation([text(20)] * 20, parting(own), parting(own))
    assert any("no earlier" in one.name for one in level.measures) is is_judged


@JUST(("prompts", "state"), [(20, "passed"), (19, "not run")])
def test_twenty_prompts_are_enough(prompts, state):
    texts = [text(10)] * prompts
    assert check_generation(texts, texts, texts).state == state


# L5


@JUST(("lost", "state"), [(71, "passed"), (72, "undecided"), (108, "undecided"), (109, "failed")])
def test_the_whole_interval_of_the_answers_kept_decides_about_99_percent(lost, state):
    right = [True] * 9_000
    new = [False] * lost + [True] * (9_000 - lost)
    assert check_task(right, right, new).state == state


# L6


def curve(*, at=None, gap=0.0, end=0.0, steps=64, norm=1.0):
    """Return losses of one, with a relative gap at a step, and another over the last tenth."""
    losses = [1.0] * steps
    if at is not None:
        losses[at] += gap
    for step in range(steps - max(steps // 10, 1), steps):
        losses[step] += end
    return Curve(losses, [norm] * steps)


def state_of(new, *, again=None, steps=64, seeds=None, dtype="bfloat16"):
    base = curve(steps=steps)
    others = [base, base] if seeds is None else seeds
    return check_training(base, [again or base], new, others, dtype=dtype).state


@JUST(
    ("dtype", "gap", "state"),
    [
        ("float32", 1.9e-5, "passed"),
        ("float32", 2.1e-5, "failed"),
        ("bfloat16", 0.049, "passed"),
        ("bfloat16", 0.051, "failed"),
    ],
)
def test_the_first_losses_may_differ_by_this_in_each_dtype(dtype, gap, state):
    assert state_of(curve(at=3, gap=gap), dtype=dtype) == state


@JUST(("step", "state"), [(31, "failed"), (32, "passed")])
def test_thirty_two_steps_are_compared_one_by_one(step, state):
    assert state_of(curve(at=step, gap=0.2)) == state


@JUST(("gap", "state"), [(0.099, "passed"), (0.101, "failed")])
def test_the_first_losses_may_differ_by_twice_what_a_second_run_does(gap, state):
    assert state_of(curve(at=3, gap=gap), again=curve(at=3, gap=0.05)) == state


@JUST(("end", "state"), [(0.0024, "passed"), (0.0026, "failed")])
def test_a_long_run_ends_within_a_quarter_of_a_percent(end, state):
    seeds = [curve(end=one, steps=100) for one in (-0.01, 0.01)]
    assert state_of(curve(end=end, steps=100), steps=100, seeds=seeds) == state


@JUST(("end", "state"), [(0.0019, "passed"), (0.0021, "failed")])
def test_a_long_run_ends_within_the_band_of_the_seeds(end, state):
    seeds = [curve(end=one, steps=100) for one in (0.0, 0.002)]
    assert state_of(curve(end=end, steps=100), steps=100, seeds=seeds) == state


@JUST(("steps", "state"), [(99, "passed"), (100, "failed")])
def test_a_run_is_long_from_a_hundred_steps_on(steps, state):
    assert state_of(curve(end=0.01, steps=steps), steps=steps) == state


@JUST(("norm", "state"), [(1.019, "passed"), (1.021, "failed")])
def test_gradient_norms_may_differ_by_two_percent(norm, state):
    assert state_of(curve(norm=norm)) == state


@JUST(("seeds", "state"), [(2, "passed"), (1, "not run")])
def test_three_seeds_are_enough(seeds, state):
    assert state_of(curve(), seeds=[curve()] * seeds) == state
