from kprof.analyze.work import Work
from tests.analyze.calls import tensor, work_of

# A is 2x3, B is 3x5: 30 multiply-adds; 6 + 15 elements read, 10 written.
A, B = tensor("bf16", 2, 3), tensor("bf16", 3, 5)


def test_a_product_takes_two_flops_per_multiply_add():
    assert work_of("aten::mm", A, B) == Work(60, 2 * (6 + 15 + 10), "bf16")


def test_a_given_result_tensor_does_not_count_twice():
    assert work_of("aten::mm", A, B, tensor("bf16", 2, 5)) == Work(60, 62, "bf16")


def test_a_bias_is_read_once_however_often_it_is_added():
    work = work_of("aten::addmm", tensor("bf16", 5), A, B, 1, 1)
    assert work == Work(60, 62 + 10, "bf16")


def test_a_batch_repeats_the_product():
    a, b = tensor("fp32", 4, 2, 3), tensor("fp32", 4, 3, 5)
    assert work_of("aten::bmm", a, b) == Work(240, 4 * 4 * 31, "fp32")


def test_an_expanded_factor_is_read_once():
    b = tensor("fp32", 4, 3, 5, strides=[0, 5, 1])
    assert work_of("aten::bmm", tensor("fp32", 4, 2, 3), b).bytes == 4 * (24 + 15 + 40)


def test_a_batched_product_reads_what_it_adds_to():
    added = tensor("fp32", 4, 2, 5)
    a, b = tensor("fp32", 4, 2, 3), tensor("fp32", 4, 3, 5)
    assert work_of("aten::baddbmm", added, a, b, 1, 1) == Work(240, 4 * (4 * 31 + 40), "fp32")


def test_matmul_broadcasts_its_batches_and_takes_vectors():
    assert work_of("aten::matmul", tensor("fp32", 7, 2, 3), tensor("fp32", 3, 5)).flops == 420
    assert work_of("aten::matmul", tensor("fp32", 2, 3), tensor("fp32", 3)).flops == 12
    assert work_of("aten::dot", tensor("fp32", 3), tensor("fp32", 3)) == Work(6, 28, "fp32")
    assert work_of("aten::mv", tensor("fp32", 2, 3), tensor("fp32", 3)) == Work(12, 44, "fp32")


def test_a_matrix_times_a_vector_may_be_added_to_one():
    work = work_of("aten::addmv", tensor("fp32", 2), tensor("fp32", 2, 3), tensor("fp32", 3), 1, 1)
    assert work == Work(12, 44 + 8, "fp32")


def test_a_linear_layer_multiplies_by_the_transposed_weight():
    x, weight, bias = tensor("bf16", 4, 2, 3), tensor("bf16", 5, 3), tensor("bf16", 5)
    assert work_of("aten::linear", x, weight, bias) == Work(240, 2 * (24 + 15 + 5 + 40), "bf16")
    assert work_of("aten::linear", x, weight, None).bytes == 2 * (24 + 15 + 40)
    assert work_of("aten::mkldnn_linear", x, weight, bias).flops == 240
    assert work_of("mkl::_mkl_linear", x, None, weight, bias, 4).flops == 240


def test_the_backward_of_a_linear_layer_makes_the_gradients_that_were_asked_for():
    x, grad, weight = tensor("fp32", 2, 3), tensor("fp32", 2, 5), tensor("fp32", 5, 3)
    both = work_of("aten::mkldnn_linear_backward", x, grad, weight, [True, True, False])
    one = work_of("aten::mkldnn_linear_backward", x, grad, weight, [False, True, False])
    assert both == Work(120, 4 * (10 + 6 + 6 + 15 + 15), "fp32")
    assert work_of("aten::mkldnn_linear_backward", x, grad, weight) == both
    assert one == Work(60, 4 * (10 + 6 + 15 + 15), "fp32")


def scaled(*rest):
    scale = tensor("fp32")
    pair = tensor("fp8", 2, 3), tensor("fp8", 3, 5)
    return work_of("aten::_scaled_mm", *pair, scale, scale, *rest)


def test_a_scaled_product_reads_fp8_and_its_scales_and_writes_the_type_asked_for():
    bf16, fp32 = 15, 6
    assert scaled(None, None, bf16, False) == Work(60, 6 + 15 + 8 + 20, "fp8")
    assert scaled(None, None, fp32, False).bytes == 6 + 15 + 8 + 40
    assert scaled(None, None, None, False).bytes == 6 + 15 + 8 + 10


def test_a_scaled_product_whose_type_was_not_recorded_writes_at_least_one_byte_each():
    assert scaled() == Work(60, 6 + 15 + 8 + 10, "fp8", "at least")


def test_a_complex_multiply_add_is_eight_flops():
    work = work_of("aten::mm", tensor("complex64", 2, 3), tensor("complex64", 3, 5))
    assert work == Work(8 * 30, 8 * (6 + 15 + 10), "fp32")


def test_two_small_floats_in_an_element_are_two_multiply_adds():
    scale = tensor("fp8", 4)
    pair = tensor("fp4x2", 2, 8), tensor("fp4x2", 8, 5)
    work = work_of("aten::_scaled_mm", *pair, scale, scale, None, None, 15, False)
    assert work == Work(2 * 2 * 5 * 16, 16 + 40 + 8 + 20, "fp4")


def test_an_int8_product_writes_int32():
    work = work_of("aten::_int_mm", tensor("int8", 2, 3), tensor("int8", 3, 5))
    assert work == Work(60, 6 + 15 + 40, "int8")


def test_a_grouped_product_gives_each_row_one_matrix():
    work = work_of("aten::_grouped_mm", tensor("bf16", 8, 3), tensor("bf16", 4, 3, 5))
    assert work == Work(2 * 8 * 3 * 5, 2 * (24 + 60 + 40), "bf16")


def test_a_product_grouped_along_its_inner_dimension_writes_a_matrix_for_each_group():
    ends = tensor("int32", 4)
    work = work_of("aten::_grouped_mm", tensor("bf16", 3, 8), tensor("bf16", 8, 5), ends)
    assert work == Work(2 * 3 * 8 * 5, 2 * (24 + 40 + 4 * 15) + 16, "bf16")


def test_factors_that_do_not_fit_have_unknown_work():
    assert work_of("aten::mm", A, tensor("bf16", 4, 5)) is None
    assert work_of("aten::mm", tensor("bf16", 3), B) is None


def test_an_outer_product_writes_every_pair():
    work = work_of("aten::addr", tensor("fp32", 2, 3), tensor("fp32", 2), tensor("fp32", 3))
    assert work == Work(12, 4 * (6 + 2 + 3 + 6), "fp32")


def test_batches_that_are_added_up_write_one_matrix():
    pair = tensor("fp32", 4, 2, 3), tensor("fp32", 4, 3, 5)
    work = work_of("aten::addbmm", tensor("fp32", 2, 5), *pair)
    assert work == Work(2 * 4 * 30, 4 * (10 + 24 + 60 + 10), "fp32")
