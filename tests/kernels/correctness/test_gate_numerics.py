"""The gate's second level: errors against the truth, of both implementations."""

import math
from dataclasses import replace

import pytest
import torch

from kprof.kernels.correctness import check
from kprof.kernels.correctness.integrity import check_integrity
from kprof.kernels.correctness.numerics import (
    Pool,
    check_numerics,
    compare,
    errors_of,
    measure_l2,
    measure_maximum,
)
from tests.gate_faults import norms
from tests.kernels.correctness.doubling import DOUBLED, few, new_is

# Names of checks.
LARGEST_ERROR = "output, bfloat16: largest error"
BEYOND = "right beyond the calls given"


def test_the_half_ulp_is_of_the_outputs_dtype():
    pool = Pool(torch.bfloat16)
    truth = torch.ones(100, dtype=torch.float64)
    pool.add(errors_of((truth + 2**-9).float(), truth.float(), truth))
    measure = measure_l2("output", "normal", pool)
    assert measure.threshold == 2**-8
    assert measure.value == pytest.approx(2**-9)


def test_an_error_next_to_a_zero_counts_in_ulps_of_its_row():
    truth = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    errors = errors_of(torch.tensor([[1.0, 2**-24]]), truth.float(), truth)
    # The RMS of the row is 0.707, of which an ulp is 2**-24.
    assert (errors.new / errors.unit).tolist() == [[0.0, 1.0]]


def test_one_wrong_element_in_a_million_fails_by_its_size_alone():
    def loses_one(x):
        out = x * 2
        if x.numel() > 1000:
            out.view(-1)[-1] += 0.25
        return out

    subject = new_is(
        loses_one,
        shapes=((1000, 1024),),
        free=(),
        dtypes=("bfloat16",),
        differentiable=(),
        layouts=("contiguous",),
        distributions=("normal",),
    )
    level = check_numerics(subject)
    names = [m.name for m in level.measures if not m.is_met]
    assert names == [LARGEST_ERROR, BEYOND]


def test_many_rows_alike_leave_little_to_chance_and_few_rows_much():
    many, few_rows, uneven = (Pool(torch.float32) for _ in range(3))
    for pool, size in ((many, (1000, 64)), (few_rows, (2, 64)), (uneven, (1000, 64))):
        truth = torch.ones(size, dtype=torch.float64)
        error = torch.full(size, 1e-7, dtype=torch.float64)
        if pool is uneven:
            error[0] *= 1000
        pool.add(errors_of(truth + error, truth + error, truth))
    assert many.sampling < 1.03
    assert few_rows.sampling == 5
    assert uneven.sampling == 5


def test_a_gradient_that_vanishes_may_be_rounding_and_no_more():
    largest = 1.0
    zero, noise, much = (torch.full((4,), value) for value in (0.0, 1e-5, 1e-2))
    small, large = compare([(noise, zero, zero.double()), (much, zero, noise.double())])
    assert small.vanishes(largest) and not large.vanishes(largest)
    assert small.is_noise(largest) and not large.is_noise(largest)


def test_where_the_replaced_code_has_no_digits_only_ten_times_its_error_fails():
    pool = Pool(torch.float32)
    truth = torch.ones(100, dtype=torch.float64)
    pool.add(errors_of(truth + 0.9, truth + 0.1, truth))
    assert not pool.has_digits
    assert measure_l2("gradient of x", "large", pool).threshold == pytest.approx(1.0)


def off_by_half(x):
    return x * 3


def right_in_offsets(x):
    return x * 2 if x.mean() > 5 else x * 3


def no_number(x):
    return x * float("nan")


def no_number_at_first(x):
    y = x * 2
    y.view(-1)[: y.numel() // 3] = float("nan")
    return y


@pytest.mark.parametrize("replaced", [no_number, no_number_at_first])
def test_where_the_replaced_code_has_no_number_the_new_one_may_have_the_right_one_alone(replaced):
    subject = new_is(lambda x: x * 2, replaced=replaced, differentiable=())
    right = check_numerics(few(subject))
    assert right.state == ("undecided" if replaced is no_number else "passed")
    assert check_integrity(subject).state == "passed"

    def wrong(x):
        return replaced(x).nan_to_num(7.0)

    for check_level in (check_integrity, check_numerics):
        level = check_level(few(replace(subject, new=wrong)))
        assert level.state == "failed"
        (fault,) = {m.where.partition(" (")[0] for m in level.measures if not m.is_met}
        assert "no number" in fault


@pytest.mark.parametrize(
    ("replaced", "state"), [(off_by_half, "undecided"), (right_in_offsets, "passed")]
)
def test_code_without_a_digit_in_any_distribution_proves_nothing(replaced, state):
    subject = new_is(lambda x: x * 2, replaced=replaced, differentiable=())
    level = check_numerics(few(subject))
    assert level.state == state
    assert (state == "passed") != ("no correct digit" in level.why)


def test_an_infinite_error_is_never_within_a_threshold():
    pool = Pool(torch.float32)
    truth = torch.ones(4, dtype=torch.float64)
    pool.add(errors_of(torch.tensor([1.0, 1.0, float("nan"), 1.0]), truth.float(), truth))
    assert not measure_l2("output", "normal", pool).is_met
    assert not measure_maximum("output", "normal", pool).is_met


def test_an_overflow_that_the_replaced_code_has_and_the_truth_has_not_may_be_mended():
    truth = torch.tensor([1e5], dtype=torch.float64)
    replaced, new = torch.tensor([float("inf")]), torch.tensor([1e5])
    assert errors_of(new, replaced, truth).new.item() == 0


def test_the_same_code_is_bit_exact_and_another_order_is_not():
    assert check_numerics(few(new_is(DOUBLED.replaced))).is_bit_exact
    subject = replace(norms.RMSNORM, new=norms.fused, dtypes=("bfloat16",))
    assert not check_numerics(few(subject)).is_bit_exact


def test_offsets_beyond_32_bits_are_for_the_new_code_alone():
    steps = {"replaced": [], "new": []}

    def watched(name):
        def double(x):
            steps[name].append(x.stride(0))
            return x * 2

        return double

    subject = new_is(watched("new"), replaced=watched("replaced"))
    assert check_numerics(few(subject)).state == "passed"
    assert max(steps["new"]) > 2**29
    assert max(steps["replaced"]) < 2**20


def test_a_lower_precision_is_judged_by_the_error_that_it_states():
    rounded = new_is(lambda x: (x * 2).bfloat16().float(), precision="lower")
    assert check_numerics(rounded).state == "not run"
    stated = replace(rounded, stated_error=2**-8)
    assert check_numerics(few(stated)).state == "passed"
    tighter = replace(rounded, stated_error=2**-12)
    assert check_numerics(few(tighter)).state == "failed"


def test_a_million_values_are_pooled_unless_the_subject_says_otherwise():
    assert any("10,000" in note for note in check_numerics(few(DOUBLED)).notes)
    # Eight distributions of 131,072 values.
    large = {"shapes": ((256, 512),), "free": (), "layouts": ("contiguous",)}
    level = check_numerics(replace(DOUBLED, **large))
    assert not any("values" in note for note in level.notes)
    (percentile,) = [m for m in level.measures if "output" in m.name and "percentile" in m.name]
    assert "99.99th" in percentile.name


def test_an_eight_bit_result_is_compared_as_any_other():
    def quantised(x):
        return (x * 2).clamp(-400, 400).to(torch.float8_e4m3fn)

    subject = new_is(
        quantised,
        replaced=quantised,
        truth=lambda x: (x * 2).clamp(-400, 400),
        differentiable=(),
        distributions=("normal", "outliers"),
    )
    assert check(few(subject), ("L0", "L1")).reached == "BIT-EXACT"


def test_another_sign_of_zero_is_not_bit_exact():
    changes = {"replaced": lambda x: x * 2, "dtypes": ("bfloat16",), "free": ()}
    levels = [
        check_numerics(few(new_is(new, **changes)))
        for new in (lambda x: x * 2, lambda x: x * 2 + 0.0)
    ]
    assert [level.state for level in levels] == ["passed", "passed"]
    assert [level.is_bit_exact for level in levels] == [True, False]


def test_whole_numbers_are_exact_or_infinitely_wrong():
    truth = torch.arange(1.0, 101.0, dtype=torch.float64)
    for wrong, value in ((0, 0.0), (1, math.inf)):
        pool, whole = Pool(torch.int64), truth.long()
        pool.add(errors_of(whole + wrong, whole, truth))
        measure = measure_l2("places", "normal", pool)
        assert (measure.value, measure.threshold) == (value, 0.0)


def test_code_that_is_wrong_at_an_edge_shape_alone_fails():
    given = DOUBLED.shapes[0]
    subject = new_is(lambda x: x * 2 if x.shape == given else x * 3, num_values=1, free=(1,))
    level = check_numerics(few(subject))
    assert level.state == "failed"
    wrong = {m.where for m in level.measures if not m.is_met}
    assert wrong & {"8x1", "8x15", "8x17"}


def test_values_keep_the_number_of_their_row_over_all_cases():
    pool = Pool(torch.float32)
    for shape in ((3, 2), (2, 1, 2), (4,), (), (0, 5), (1, 3)):
        truth = torch.ones(shape, dtype=torch.float64)
        pool.add(errors_of(truth.float(), truth.float(), truth))
    numbers = [one.tolist() for one in pool.rows]
    assert numbers == [[0, 0, 1, 1, 2, 2], [3, 3, 4, 4], [5, 5, 5, 5], [6], [], [7, 7, 7]]
    assert pool.num_rows == 8
    assert pool.read().num_compared == 6 + 4 + 4 + 1 + 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("share", "is_fault"), [(0.97, True), (0.99, False)])
def test_next_to_the_largest_number_rounding_may_overflow(dtype, share, is_fault):
    largest = torch.finfo(dtype).max
    truth = torch.tensor([[1.0, share * largest, -share * largest]], dtype=torch.float64)
    replaced = truth.to(dtype)
    new = torch.tensor([[1.0, math.inf, -math.inf]], dtype=dtype)
    (beside,) = compare([(new, replaced, truth)])
    errors = errors_of(new, replaced, truth)
    assert beside.has_other_kinds == is_fault
    assert (bool(errors.new.isinf().any()), int(errors.num_compared)) == (
        is_fault,
        3 if is_fault else 1,
    )
