from dataclasses import replace

from kprof.analyze.roofline.operator_work import find_model
from kprof.analyze.work import Work
from tests.analyze.calls import inputs, tensor, work_of

X = tensor("fp32", 2, 3, 4)


def test_a_reduction_reads_all_and_writes_what_is_left():
    assert work_of("aten::sum", X, [1], False, None) == Work(24, 96 + 32, "fp32")
    assert work_of("aten::mean", X, [-1], True, None) == Work(24, 96 + 24, "fp32")
    assert work_of("aten::amax", X, [0, 2], False) == Work(24, 96 + 12, "fp32")


def test_a_reduction_over_everything_writes_one_result():
    assert work_of("aten::sum", X, None) == Work(24, 96 + 4, "fp32")
    assert work_of("aten::sum", X, [], False, None) == Work(24, 96 + 4, "fp32")


def test_a_norm_has_its_order_before_its_dimensions():
    assert work_of("aten::linalg_vector_norm", X, 2, [1], False, None).bytes == 96 + 32


def test_places_and_truths_have_their_own_sizes():
    assert work_of("aten::argmax", X, -1, False).bytes == 96 + 6 * 8
    assert work_of("aten::any", X, 2, False).bytes == 96 + 6


def test_an_extreme_along_a_dimension_comes_with_its_place():
    assert work_of("aten::max", X).bytes == 96 + 4
    assert work_of("aten::max", X, 1, False).bytes == 96 + 8 * 12
    assert work_of("aten::max", X, X).bytes == 3 * 96


def test_a_running_sum_writes_as_much_as_it_reads():
    assert work_of("aten::cumsum", X, -1, None) == Work(24, 192, "fp32")


def test_a_selection_is_known_by_its_least_bytes_only():
    assert work_of("aten::topk", X, 2, -1, True, True) == Work(None, 96 + 6 * 2 * 12)
    assert work_of("aten::sort", X, -1, False) == Work(None, 96 + 96 + 192)


def test_the_input_may_stand_after_an_empty_argument():
    assert work_of("aten::sum", None, X, [1], False, None) == Work(24, 96 + 32, "fp32")


def test_a_sum_over_dimensions_that_were_not_recorded_writes_at_least_one_result():
    _, model = find_model("aten::sum")
    known = inputs(tensor("fp32", 8, 10), [1], False, None)
    unknown = model(replace(known, values=()))
    assert (unknown.bytes, unknown.bound) == (324, "at least")
    assert model(known).bytes == 352


def test_how_much_a_selection_finds_is_unknown():
    work = work_of("aten::nonzero", tensor("fp32", 8))
    assert (work.bytes, work.bound) == (32, "at least")
