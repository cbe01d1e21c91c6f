"""The quality gate on functions: what it notices (L0, L1), and the class that levels make."""

import time
from dataclasses import replace

import pytest
import torch

from kprof.gate import GateReport, Level, Measure, Subject, Timing, check
from kprof.gate.check import GateError
from kprof.gate.deviation import (
    Pool,
    errors_of,
    is_noise,
    measure_l2,
    measure_maximum,
    vanishes,
)
from kprof.gate.honesty import find_patched_timers, find_wrong_outputs
from kprof.gate.inputs import Draw, edge_shapes, place
from kprof.gate.integrity import check_integrity
from kprof.gate.memory import LARGE_BYTE, Guarded
from kprof.gate.numerics import check_numerics
from kprof.gate.observe import draw
from kprof.gate.result import (
    BEHAVIOURAL,
    BIT_EXACT,
    LEVELS,
    NUMERICAL,
    REJECT,
    TASK,
    judge,
    not_run,
)
from kprof.gate.subject import Case
from tests.gate_faults import CHEATS, FAULTS, HONEST, ON_A_GPU, SAME, SUBJECTS, norms, restored

FEW_VALUES = 50_000
DOUBLED = Subject(
    "doubled",
    replaced=lambda x: x * 2,
    new=lambda x: x + x,
    truth=lambda x: x * 2,
    inputs=lambda shape, draw: (draw(*shape),),
    shapes=((8, 16),),
    free=(0, 1),
    dtypes=("float32",),
    differentiable=(0,),
    rows=(0,),
)


def new_is(function, **changes):
    return replace(DOUBLED, new=function, **changes)


def few(subject):
    """Return the subject with fewer values pooled, to be done sooner."""
    return replace(subject, num_values=FEW_VALUES)


def is_caught(subject):
    """Tell whether L0 or, with fewer values than usual, L1 fails."""
    with restored():
        if check_integrity(subject).state == "failed":
            return True
        return check_numerics(few(subject)).state == "failed"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda v: f"{v.operation}: {v.name}")
def test_a_seeded_fault_is_caught(fault):
    assert is_caught(fault.subject)


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda v: v.name)
def test_a_cheat_on_the_clock_is_caught(cheat):
    assert is_caught(cheat.subject)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fault", ON_A_GPU, ids=lambda v: v.name)
def test_a_fault_with_streams_or_graphs_is_caught(fault):
    assert is_caught(fault.subject)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("same", [v for v in SAME if v.operation != "attention"], ids=str)
def test_the_same_code_passes_on_a_gpu(same):
    assert not is_caught(replace(same.subject, device="cuda"))


@pytest.mark.parametrize("honest", SAME + HONEST, ids=lambda v: f"{v.operation}: {v.name}")
def test_an_honest_implementation_passes(honest):
    assert not is_caught(honest.subject)


# L0


def why_of(subject):
    level = check_integrity(subject)
    return [measure.where for measure in level.measures if not measure.is_met]


def test_a_function_that_only_rounds_otherwise_is_whole():
    assert check_integrity(DOUBLED).state == "passed"


def test_a_function_that_raises_where_the_replaced_one_does_not_fails():
    def refuses(x):
        raise ValueError("no")

    assert "raises ValueError: no" in why_of(new_is(refuses))[0]


def test_cases_that_the_replaced_code_refuses_are_not_asked_of_the_new_one():
    def refuses_empty(x):
        if x.numel() == 0:
            raise ValueError("empty")
        return x * 2

    assert check_integrity(new_is(refuses_empty, replaced=refuses_empty)).state == "passed"


def test_code_that_is_wrong_only_where_no_gradient_is_asked_for_fails():
    def for_training_alone(x):
        return x * 2 if x.requires_grad else x * 3

    assert "output is wrong by" in why_of(new_is(for_training_alone))[0]


def test_another_shape_or_dtype_fails():
    assert "is (8, 16) torch.float64" in why_of(new_is(lambda x: (x * 2).double()))[0]


def test_what_the_replaced_code_does_as_well_is_noted_and_not_held_against_the_new_one():
    def writes_input(x):
        out = x * 2
        x.detach().add_(1)
        return out

    level = check_integrity(new_is(writes_input, replaced=writes_input, differentiable=()))
    assert level.state == "passed"
    assert any("the replaced code does so, too: changes its input x" in n for n in level.notes)


def test_a_declared_difference_from_run_to_run_is_no_fault():
    subject = next(v for v in FAULTS if v.name == "order_race").subject
    assert check_integrity(replace(subject, is_deterministic=False)).state == "passed"


def test_batch_invariance_is_reported_and_judged_only_where_it_is_claimed():
    def depends_on_its_neighbours(x):
        return x * 2 if x.shape[0] > 4 else (x * 2).nextafter(torch.tensor(9e9))

    level = check_integrity(new_is(depends_on_its_neighbours, differentiable=()))
    assert level.state == "passed"
    assert any(
        "rows get other bits in a smaller batch, 0 in the replaced" in n for n in level.notes
    )
    claimed = new_is(depends_on_its_neighbours, differentiable=(), is_batch_invariant=True)
    assert "rows that depend on their neighbours" in check_integrity(claimed).why


def test_a_time_below_the_floor_fails():
    assert check_integrity(DOUBLED, Timing(measured_ns=99, floor_ns=100)).state == "failed"
    assert check_integrity(DOUBLED, Timing(measured_ns=101, floor_ns=100)).state == "passed"


def test_a_time_that_nobody_held_against_its_floor_is_mentioned():
    assert any("floor" in note for note in check_integrity(DOUBLED).notes)


def test_a_timed_output_can_be_verified_afterwards():
    case = Case((8, 16), "float32")
    arguments = draw(DOUBLED, case)
    assert find_wrong_outputs(DOUBLED, case, arguments, arguments[0] * 2) is None
    assert "wrong by" in find_wrong_outputs(DOUBLED, case, arguments, arguments[0] * 2.1)


def test_genuine_clocks_are_recognised_and_patched_ones_named():
    assert find_patched_timers() == []
    with restored():
        time.perf_counter = lambda: 0.0
        assert find_patched_timers() == ["replaces time.perf_counter"]


# Memory


@pytest.mark.parametrize("layout", ["contiguous", "padded", "transposed"])
def test_a_placed_tensor_keeps_its_values_between_guards(layout):
    tensor = torch.arange(12.0).view(3, 4)
    placed = place(tensor, layout)
    assert torch.equal(placed.view, tensor)
    assert not placed.was_changed() and not placed.was_overrun()


def test_a_write_beside_a_placed_tensor_is_an_overrun_and_one_inside_a_change():
    beside, inside = place(torch.ones(4), "contiguous"), place(torch.ones(4), "contiguous")
    beside.view.as_strided((1,), (1,), beside.view.storage_offset() + 4).zero_()
    inside.view[3] = 0
    assert (beside.was_overrun(), beside.was_changed()) == (True, False)
    assert (inside.was_overrun(), inside.was_changed()) == (False, True)


def test_a_padded_layout_is_neither_dense_nor_aligned():
    view = place(torch.ones(3, 4), "padded").view
    assert view.stride() == (25, 5) or not view.is_contiguous()
    assert view.storage_offset() * view.element_size() % 16


def test_a_far_layout_has_offsets_that_32_bits_do_not_reach():
    view = place(torch.ones(3, 4), "far").view
    assert 2 * view.stride(0) >= 2**31
    assert torch.equal(view, torch.ones(3, 4))


def test_uninitialised_memory_comes_poisoned_and_guarded():
    with Guarded() as guarded:
        assert torch.empty(3).isnan().all()
        assert torch.empty_like(torch.ones(2, dtype=torch.int64)).eq(-1).all()
    assert not guarded.was_overrun()


def test_a_write_past_the_end_of_what_was_allocated_is_noticed():
    with Guarded(LARGE_BYTE) as guarded:
        made = torch.empty(3)
        made.as_strided((4,), (1,), made.storage_offset()).zero_()
    assert guarded.was_overrun()


# Inputs


def test_a_case_draws_the_same_values_every_time_and_another_seed_others():
    case = Case((4, 8), "bfloat16", seed=3)
    one, two = draw(DOUBLED, case)[0], draw(DOUBLED, case)[0]
    assert torch.equal(one, two)
    assert not torch.equal(one, draw(replace(DOUBLED, seed=1), case)[0])


def test_edge_shapes_are_one_and_one_off_the_size_and_off_the_tile_below_it():
    subject = replace(DOUBLED, shapes=((100, 7),), free=(0,))
    assert edge_shapes(subject) == [(1, 7), (63, 7), (65, 7), (99, 7), (101, 7)]


@pytest.mark.parametrize(
    ("distribution", "holds"),
    [
        ("zeros", lambda x: x.eq(0).all()),
        ("half_zero", lambda x: x[:16].eq(0).all() and x[16:].ne(0).all()),
        ("large", lambda x: x.abs().mean() > 500),
        ("small", lambda x: x.abs().max() < 0.01),
        ("offset", lambda x: x.mean() > 7),
        ("nonfinite", lambda x: not x.flatten()[-1].isfinite()),
    ],
)
def test_a_distribution_is_what_its_name_says(distribution, holds):
    assert holds(Draw(Case((32, 64), "float32", distribution), DOUBLED)(32, 64))


# L1


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
    assert [m.name for m in level.measures if not m.is_met] == ["output, bfloat16: largest error"]


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
    assert vanishes(zero.double(), largest)
    assert not vanishes(noise.double(), largest)
    assert is_noise(noise, zero, largest)
    assert not is_noise(much, zero, largest)


def test_where_the_replaced_code_has_no_digits_only_ten_times_its_error_fails():
    pool = Pool(torch.float32)
    truth = torch.ones(100, dtype=torch.float64)
    pool.add(errors_of(truth + 0.9, truth + 0.1, truth))
    assert not pool.has_digits
    assert measure_l2("gradient of x", "large", pool).threshold == pytest.approx(1.0)


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


def test_a_lower_precision_is_judged_by_the_error_that_it_states():
    rounded = new_is(lambda x: (x * 2).bfloat16().float(), precision="lower")
    assert check_numerics(rounded).state == "not run"
    stated = replace(rounded, stated_error=2**-8)
    assert check_numerics(few(stated)).state == "passed"
    tighter = replace(rounded, stated_error=2**-12)
    assert check_numerics(few(tighter)).state == "failed"


def test_a_million_values_are_pooled_unless_the_subject_says_otherwise():
    assert any("50,000" in note for note in check_numerics(few(DOUBLED)).notes)
    level = check_numerics(replace(DOUBLED, shapes=((256, 512),)))
    assert not any("values" in note for note in level.notes)
    (percentile,) = [m for m in level.measures if "output" in m.name and "percentile" in m.name]
    assert "99.99th" in percentile.name


# Classes


def report_of(states, *, is_bit_exact=False, changes_precision=False):
    levels = tuple(
        Level(n, states.get(n, "not run"), "", is_bit_exact=is_bit_exact and n == "L1")
        for n in LEVELS
    )
    return GateReport("swap", levels, tuple(states), changes_precision)


def passed(*names):
    return dict.fromkeys(names, "passed")


@pytest.mark.parametrize(
    ("states", "reached"),
    [
        (passed("L0", "L1", "L2"), NUMERICAL),
        (passed("L0", "L1"), None),
        (passed("L0", "L3", "L4"), BEHAVIOURAL),
        (passed("L0", "L5"), TASK),
        (passed("L1", "L2", "L3", "L4", "L5"), None),
        (passed("L0", "L2", "L3", "L4") | {"L1": "failed"}, BEHAVIOURAL),
        (passed("L0", "L1", "L2") | {"L3": "failed"}, REJECT),
        (passed("L0", "L1", "L2", "L5") | {"L3": "failed"}, TASK),
        (passed("L0", "L1", "L2", "L3", "L4") | {"L5": "failed"}, REJECT),
        (passed("L1", "L2", "L3", "L4", "L5") | {"L0": "failed"}, REJECT),
        (passed("L0", "L1", "L2") | {"L6": "failed"}, REJECT),
        (passed("L0", "L3") | {"L4": "undecided"}, None),
    ],
)
def test_a_class_is_reached_by_its_levels_and_vetoed_by_weaker_ones(states, reached):
    assert report_of(states).reached == reached


def test_bit_exact_needs_every_bit_and_no_precision_changed():
    states = passed("L0", "L1", "L5")
    assert report_of(states, is_bit_exact=True).reached == BIT_EXACT
    assert report_of(states, is_bit_exact=True, changes_precision=True).reached == TASK


def test_a_change_of_precision_is_never_more_than_task_equivalent():
    assert report_of(passed(*LEVELS), changes_precision=True).reached == TASK
    assert report_of(passed("L0", "L1", "L2", "L3", "L4"), changes_precision=True).reached is None


def test_a_level_that_was_asked_for_and_not_run_does_not_pass():
    report = check(DOUBLED, ("L0", "L2"))
    assert (report["L0"].state, report["L2"].state) == ("passed", "not run")
    assert not report.passed


def test_the_report_says_what_the_next_class_needs():
    assert report_of(passed("L0", "L1")).missing == ("L2",)
    assert report_of(passed("L0", "L5")).missing == ("L1", "L2")
    assert report_of(passed("L0") | {"L1": "failed"}).missing == ("L5",)
    assert report_of(passed("L0", "L1", "L2")).missing == ()


def test_a_number_that_is_none_breaks_every_threshold():
    assert judge("L3", [Measure("x", float("nan"), 1.0, None)], "").state == "failed"
    assert (
        judge("L3", [Measure("x", float("nan"), 1.0, None, better="higher")], "").state == "failed"
    )


def test_a_level_that_was_not_run_says_why():
    assert (not_run("L5", "no task was given").state, check(DOUBLED, ("L5",))["L5"].why) == (
        "not run",
        "no model was given",
    )


def test_an_unknown_level_is_an_error():
    with pytest.raises(GateError, match="unknown levels: L7"):
        check(DOUBLED, ("L7",))


def test_there_must_be_something_to_check():
    with pytest.raises(GateError, match="nothing to check"):
        check()


def test_every_operation_is_there():
    assert len(SUBJECTS) == 9


def test_a_lower_precision_keeps_its_integrity_and_a_wrong_result_of_it_does_not():
    rounded = new_is(lambda x: (x * 2).bfloat16().float(), precision="lower", stated_error=2**-8)
    assert check_integrity(rounded).state == "passed"
    assert check_integrity(replace(rounded, new=lambda x: x.bfloat16().float())).state == "failed"


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
    assert check(subject, ("L0", "L1")).reached == "BIT-EXACT"
