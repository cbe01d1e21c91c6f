"""Laws of all work models, and the tensors and works that they speak of."""

import contextlib
import random

import pytest

from kprof.analyze.roofline.operator_work import find_model
from kprof.analyze.work import Inputs, Tensor, Work, broadcast, promote, written_by
from kprof.errors import modules_in
from tests.analyze.calls import inputs, tensor, tensors, work_of

FAMILIES = modules_in("kprof.analyze.work")
MODELS = {
    name: model
    for family in FAMILIES
    for name, model in {
        **getattr(family, "MODELS", {}),
        **getattr(family, "PREFIXES", {}),
    }.items()
}


def test_models_without_recorded_shapes_know_no_work():
    assert len(MODELS) > 900
    assert {name: work for name, work in works(Inputs((), ())) if work is not None} == {}


def test_models_of_arguments_that_are_no_tensors_know_no_work():
    found = works(inputs(1, 2.0, None, "text", True, [1, 2]))
    # An allocation has none, whatever it is given.
    assert {name: work for name, work in found if work not in (None, Work(0, 0))} == {}


def works(given):
    return [(name, model(given)) for name, model in MODELS.items()]


# How a model tells that arguments do not fit it, beside returning None.
MISFITS = (ArithmeticError, LookupError, TypeError, ValueError)


def random_argument(draw):
    """Return a tensor in six of ten cases, else a list of tensors, nothing, or a plain value."""
    lengths = [draw.choice([0, 1, 2, 3, 8]) for _ in range(draw.randrange(5))]
    plain = draw.choice([None, 0, 1, -1, True, 0.5, "text", [], [1], [2, 2], [True, False, True]])
    of_list = [[2, 3]] * draw.randrange(3)
    kind = draw.choices(["tensor", "tensors", "plain"], [6, 1, 3])[0]
    of_kind = {"tensors": tensors(*of_list), "plain": plain}
    dtype = draw.choice(["bf16", "fp32", "int64", "bool", "fp8"])
    return of_kind.get(kind, tensor(dtype, *lengths))


@pytest.mark.parametrize("seed", range(4))
def test_no_model_reads_a_tensor_that_was_not_recorded(seed):
    draw = random.Random(seed)
    for _ in range(60):
        given = inputs(*(random_argument(draw) for _ in range(draw.randrange(1, 9))))
        for model in MODELS.values():
            # A missing tensor is None, which has no attributes.
            with contextlib.suppress(*MISFITS):
                model(given)


def test_no_operator_has_two_models():
    names = [n for family in FAMILIES for n in getattr(family, "MODELS", {})]
    assert len(names) == len(set(names))


def test_an_unknown_operator_has_no_model():
    assert find_model("mylib::unheard_of") is None


def test_generated_kernels_are_found_by_the_beginning_of_their_names():
    family, _ = find_model("triton_poi_fused_add_17")
    assert family == "triton"


def test_an_expanded_tensor_takes_only_the_bytes_that_are_stored():
    expanded = Tensor((8, 4), "fp32", strides=(0, 1))
    assert (expanded.numel, expanded.bytes, expanded.written_as()) == (32, 16, 128)


def test_a_tensor_without_elements_takes_no_bytes_however_it_is_expanded():
    assert Tensor((0, 4), "fp32", strides=(0, 1)).bytes == 0


def test_a_tensor_without_dimensions_has_one_element():
    assert Tensor((), "int64").bytes == 8


def test_shapes_broadcast_from_the_right():
    assert broadcast([(8, 1, 4), (3, 1), ()]) == (8, 3, 4)
    assert broadcast([(0, 4), (1, 4)]) == (0, 4)


def test_a_wrapped_number_does_not_widen_a_tensor():
    assert promote([Tensor((4,), "bf16"), Tensor((), "fp64")]) == "bf16"


def test_a_wrapped_float_turns_integers_into_floats():
    assert promote([Tensor((4,), "int64"), Tensor((), "fp64")]) == "fp32"


def test_the_wider_of_two_tensors_gives_the_type():
    assert promote([Tensor((4,), "bf16"), Tensor((4,), "fp32")]) == "fp32"


def test_arguments_are_read_as_python_values():
    given = inputs(True, 0.5, [1, 2], [True, False], None)
    assert [given.value(i) for i in range(6)] == [True, 0.5, [1, 2], [True, False], None, None]


def test_a_list_of_tensors_is_no_tensor():
    given = inputs(tensors((2, 3), (4,)), tensor("fp32", 2))
    assert given.tensor(0) is None
    assert given.list_shapes(0) == ((2, 3), (4,))
    assert given.list_shapes(1) == ()


def test_a_list_without_its_shapes_has_unknown_work():
    assert work_of("aten::cat", tensors(), 0, element_bytes=2) is None


def test_what_the_inputs_leave_of_the_bytes_is_written():
    one = inputs(tensor("fp32", 4, 8), tensor("bf16", 4, 8), 1)
    assert written_by(Work(0, 128 + 64 + 128), one) == 128
    assert written_by(Work(0, 100), one) == 0


def test_a_model_may_say_itself_what_is_written():
    assert written_by(Work(0, 100, written=100), inputs(tensor("fp32", 4, 8))) == 100


def test_lists_of_tensors_are_read_too():
    assert inputs(tensors((2, 3), (4,)), element_bytes=2).bytes == 20
