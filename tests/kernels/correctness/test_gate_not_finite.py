"""Nothing passes the gate by NaN or infinity: what is not finite gives no threshold."""

import math
import re

import pytest
import torch

from kprof.kernels.correctness import Curve, Generation, Measure
from kprof.kernels.correctness.levels import judge
from kprof.kernels.correctness.model_levels import (
    check_generation,
    check_layers,
    check_logits,
    check_training,
)
from kprof.kernels.correctness.numerics import (
    Pool,
    beside_all,
    compare,
    errors_of,
    largest_gradient,
    measure_l2,
    measure_maximum,
)
from kprof.kernels.correctness.observe import Observed

NOT_FINITE = re.compile(r"not finite at ([\d,]+) of ([\d,]+) (\w+)")

NAN, INF = math.nan, math.inf


# A measure


@pytest.mark.parametrize(
    ("value", "threshold", "better"),
    [
        (1, INF, "lower"),
        (INF, INF, "lower"),
        (1, NAN, "lower"),
        (INF, 1, "higher"),
        (1, -INF, "higher"),
    ],
)
def test_a_measure_that_is_not_finite_is_never_met(value, threshold, better):
    measure = Measure("loss", value, threshold, 0, better=better)
    assert not measure.is_met
    assert measure.strain == INF


def test_a_level_with_a_measure_that_has_no_threshold_was_not_run():
    level = judge("L6", [Measure("gap", 1, INF, INF), Measure("norm", 1, 2, 1)], "64 steps")
    assert level.state == "not run"
    assert "gap has no" in level.why


def test_a_broken_measure_fails_whatever_has_no_threshold():
    level = judge("L6", [Measure("gap", 1, INF, INF), Measure("norm", 3, 2, 1)], "64 steps")
    assert level.state == "failed"


# L1


def pool_of(new, replaced, truth):
    """Return the errors of one case with these values, in float32."""
    pool = Pool(torch.float32)
    new, replaced = (torch.tensor(values) for values in (new, replaced))
    pool.add(errors_of(new, replaced, torch.tensor(truth, dtype=torch.float64)))
    return pool


@pytest.mark.parametrize(("new", "is_met"), [(9.0, True), (11.0, False), (NAN, False)])
def test_beside_true_zeros_ten_times_the_replaced_codes_error_fails(new, is_met):
    pool = pool_of([new] * 4, [1.0] * 4, [0.0] * 4)
    assert measure_l2("output", "zeros", pool).is_met is is_met


def test_many_ulps_of_the_replaced_code_next_to_a_zero_allow_no_infinity():
    truth, replaced = [[0.0] * 16, [1.0] * 16], [[1e-3] * 16, [1.0] * 16]
    pool = pool_of([[INF] * 16, [1.0] * 16], replaced, truth)
    assert math.isfinite(measure_maximum("output", "normal", pool).threshold)
    assert not measure_maximum("output", "normal", pool).is_met


def test_an_infinite_gradient_of_the_replaced_code_allows_no_other_one():
    replaced, zero = torch.tensor([INF, 0.0]), torch.zeros(2).double()
    given = (torch.tensor(values) for values in ([INF, 1e6], [1e6, 0.0], [INF, 0.0]))
    found = compare([(new, replaced, zero) for new in given])
    assert [one.is_noise(1.0) for one in found] == [False, False, True]


def test_the_largest_gradient_is_that_of_what_is_finite():
    truths = {"gradient of x": torch.tensor([INF, 2.0]), "gradient of w": torch.tensor([NAN, 1.0])}
    same = Observed(truths)
    assert largest_gradient(beside_all(same, same, truths)) == 2.0


# L2


def streams(*values):
    return [torch.tensor([value, 1.0, 1.0, 1.0]) for value in values]


def test_a_layer_that_is_not_finite_in_every_arm_hides_no_other_one():
    level = check_layers(streams(INF, 1.0), streams(INF, 1.0), streams(INF, 9.0))
    assert level.state == "not run"
    assert NOT_FINITE.findall(level.why) == [("1", "2", "layers")]


def test_a_layer_that_is_not_finite_in_the_new_code_alone_fails():
    level = check_layers(streams(NAN, 1.0), streams(NAN, 1.0), streams(NAN, INF))
    assert level.state == "failed"


def test_a_layer_of_zeros_is_one_like_any_other():
    zeros = [torch.zeros(4)]
    assert check_layers(zeros, zeros, zeros).state == "passed"
    assert check_layers(zeros, zeros, [torch.ones(4)]).state == "failed"


# L3


def logits_of(scale, broken=()):
    logits = scale * 3 * torch.randn(2000, 100, generator=torch.Generator().manual_seed(0))
    logits[list(broken)] = NAN
    return logits


def test_a_position_that_is_not_a_number_in_every_arm_passes_no_other_one():
    base = logits_of(1, [7])
    level = check_logits(base, base, logits_of(1.03, [7]))
    assert level.state == "not run"
    assert NOT_FINITE.findall(level.why) == [("1", "2,000", "positions")]


def test_a_position_that_is_not_a_number_in_the_new_code_alone_fails():
    base = logits_of(1, [7])
    assert check_logits(base, base, logits_of(1, [7, 8])).state == "failed"


# L4


def test_texts_are_not_held_against_none():
    empty, text = [Generation([], [])] * 20, [Generation([1], [{1: -1.0}])] * 20
    assert check_generation(empty, text, text).state == "not run"


# L6


GOOD = Curve([5 - 0.01 * i for i in range(64)])
LOST = Curve([NAN] * 64)


def test_losses_that_are_lost_in_every_arm_are_not_judged():
    level = check_training(LOST, [LOST], LOST, [LOST, LOST])
    assert level.state == "not run"
    assert NOT_FINITE.findall(level.why) == [("64", "64", "steps")]


def test_a_loss_that_a_second_run_loses_allows_no_other_one():
    assert check_training(GOOD, [LOST], Curve([99.0] * 64), [GOOD, GOOD]).state == "not run"
    assert check_training(GOOD, [LOST], LOST, [GOOD, GOOD]).state == "not run"


def test_a_loss_that_the_new_code_loses_first_fails():
    later = Curve([*GOOD.losses[:40], *[NAN] * 24])
    assert check_training(GOOD, [later], LOST, [GOOD, GOOD]).state == "failed"
    assert check_training(GOOD, [GOOD], later, [GOOD, GOOD]).state == "failed"


@pytest.mark.parametrize(("own", "state"), [(1.0, "failed"), (INF, "not run")])
def test_gradient_norms_that_are_not_finite_give_no_threshold(own, state):
    replaced, new = (Curve(GOOD.losses, [norm] * 64) for norm in (own, INF))
    assert check_training(replaced, [replaced], new, [GOOD, GOOD]).state == state
