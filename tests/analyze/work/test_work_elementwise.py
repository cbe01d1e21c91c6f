from kprof.analyze.work import Work
from tests.analyze.calls import tensor, tensors, work_of

X = tensor("bf16", 4, 8)


def test_one_result_is_written_for_every_element_read():
    assert work_of("aten::silu", X) == Work(32, 128, "fp32", written=64)


def test_both_operands_are_read():
    assert work_of("aten::add", X, X, 1) == Work(32, 192, "fp32", written=64)


def test_a_broadcast_operand_is_read_once():
    assert work_of("aten::mul", X, tensor("bf16", 8)).bytes == 2 * (32 + 8 + 32)
    expanded = tensor("bf16", 4, 8, strides=[0, 1])
    assert work_of("aten::mul", X, expanded).bytes == 2 * (32 + 8 + 32)


def test_both_operands_may_be_broadcast():
    assert work_of("aten::mul", tensor("fp32", 4, 1), tensor("fp32", 1, 8)) == Work(
        32, 4 * (4 + 8 + 32), "fp32", written=128
    )


def test_the_result_has_the_promoted_type():
    assert work_of("aten::add", X, tensor("fp32", 4, 8), 1).bytes == 64 + 128 + 128


def test_a_comparison_writes_one_byte_for_each_element():
    assert work_of("aten::eq", X, 0) == Work(32, 64 + 32, "fp32", written=32)


def test_in_place_the_result_has_the_operands_type():
    assert work_of("aten::add_", X, tensor("fp32", 4, 8), 1).bytes == 64 + 128 + 64


def test_a_given_result_is_written_and_not_read():
    work = work_of("aten::mul", X, X, tensor("fp32", 4, 8))
    assert (work.bytes, work.written) == (64 + 64 + 128, 128)


def test_a_given_result_without_elements_is_resized():
    assert work_of("aten::abs", X, tensor("bf16", 0)) == Work(32, 128, "fp32", written=64)
    assert work_of("aten::abs", X, tensor("fp32", 0)).bytes == 64 + 128


def test_a_condition_is_read_but_gives_no_type():
    work = work_of("aten::where", tensor("bool", 4, 8), X, X)
    assert work == Work(0, 32 + 64 + 64 + 64, "fp32", written=64)


def test_masked_fill_reads_its_mask():
    assert work_of("aten::masked_fill_", X, tensor("bool", 4, 8), 0).bytes == 64 + 32 + 64


def test_backward_operators_read_gradient_and_input():
    assert work_of("aten::gelu_backward", X, X, "none").bytes == 192
    assert work_of("aten::threshold_backward", X, X, 0).bytes == 192


def test_doubles_are_computed_as_doubles():
    assert work_of("aten::mul", tensor("fp64", 4), tensor("fp64", 4)).dtype == "fp64"


def test_lists_of_tensors_are_added_up():
    lists = [tensors((2, 3), (4,)), tensors((2, 3), (4,))]
    added = work_of("aten::_foreach_add_", *lists, 1, element_bytes=2)
    assert added == Work(10, 60, "fp32", written=20)
    scaled = work_of("aten::_foreach_mul_", lists[0], 0.9, element_bytes=4)
    assert scaled == Work(10, 80, "fp32", written=40)
    assert work_of("aten::_foreach_norm", lists[0], 2, element_bytes=4).bytes == 40


def test_lists_of_unknown_type_have_unknown_work():
    assert work_of("aten::_foreach_mul_", tensors((2, 3)), 0.9) is None


def test_a_gated_activation_writes_half():
    assert work_of("_C::silu_and_mul", tensor("bf16", 4, 8), tensor("bf16", 4, 16)).bytes == 192
    assert work_of("aten::glu", X, -1).bytes == 96


def test_rotary_embedding_turns_query_and_key_in_place():
    positions, angles = tensor("int64", 3), tensor("bf16", 100, 4)
    query, key = tensor("bf16", 3, 8), tensor("bf16", 3, 4)
    work = work_of("_C::rotary_embedding", positions, query, key, 4, angles, True)
    assert work == Work(3 * 36, 24 + 3 * 4 * 2 + 2 * 2 * 36, "fp32")


def test_a_product_of_complex_numbers_is_six_flops_and_a_sum_two():
    x = tensor("complex64", 10)
    assert work_of("aten::mul", x, x) == Work(60, 240, "fp32", written=80)
    assert work_of("aten::add", x, x, 1) == Work(20, 240, "fp32", written=80)


def test_two_real_numbers_make_a_complex_one():
    x = tensor("fp64", 10)
    assert work_of("aten::complex", x, x).bytes == 160 + 160


def test_the_gradient_of_a_log_sigmoid_does_not_take_the_shape_of_its_empty_buffer():
    x = tensor("fp32", 10)
    assert work_of("aten::log_sigmoid_backward", x, x, tensor("fp32", 0)).bytes == 120


def test_the_gradient_of_a_gate_has_both_halves():
    grad, x = tensor("fp32", 6, 4), tensor("fp32", 6, 8)
    assert work_of("aten::glu_backward", grad, x, 1).bytes == 4 * (24 + 48 + 48)
