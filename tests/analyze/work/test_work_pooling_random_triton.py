from kprof.analyze.work import Work
from tests.analyze.calls import tensor, work_of

X = tensor("fp32", 2, 3, 8, 8)


def test_a_maximum_over_windows_writes_values_and_places():
    name = "aten::max_pool2d_with_indices"
    work = work_of(name, X, [2, 2], [2, 2], [0, 0], [1, 1], False)
    assert work == Work(4 * 96, 4 * 384 + 12 * 96, "fp32")


def test_without_a_stride_windows_do_not_overlap():
    assert work_of("aten::avg_pool2d", X, [2, 2], [], [0, 0], False) == Work(
        4 * 96, 4 * 384 + 4 * 96, "fp32"
    )


def test_its_backward_writes_the_whole_input():
    grad, places = tensor("fp32", 2, 3, 4, 4), tensor("int64", 2, 3, 4, 4)
    window = [[2, 2], [2, 2], [0, 0], [1, 1], False]
    name = "aten::max_pool2d_with_indices_backward"
    assert work_of(name, grad, X, *window, places).bytes == 4 * 96 + 8 * 96 + 4 * 384
    assert work_of("aten::_adaptive_avg_pool2d_backward", grad, X).bytes == 4 * 96 + 4 * 384


def test_an_adaptive_mean_has_the_size_that_is_asked_for():
    assert work_of("aten::_adaptive_avg_pool2d", X, [1, 1]) == Work(384, 4 * 384 + 24, "fp32")


def test_dropout_writes_a_mask_of_bytes():
    x = tensor("bf16", 4, 8)
    assert work_of("aten::native_dropout", x, 0.1, True) == Work(32, 64 + 64 + 32, "fp32")
    mask = tensor("bool", 4, 8)
    assert work_of("aten::native_dropout_backward", x, mask, 1.1).bytes == 64 + 32 + 64


def test_drawing_numbers_only_writes():
    work = work_of("aten::normal_", tensor("fp32", 4, 8), 0, 1, None)
    assert work == Work(0, 128, written=128)


def test_a_generated_kernel_touches_each_buffer_once():
    x, scale = tensor("bf16", 4, 8), tensor("bf16", 8)
    assert work_of("triton_poi_fused_mul_0", x, scale, x, 32) == Work(None, 64 + 16 + 64)


def test_a_generated_lookup_reads_as_many_elements_as_it_has_points():
    index, table, out = tensor("int64", 4), tensor("bf16", 1000, 8), tensor("bf16", 4, 8)
    assert work_of("triton_poi_fused_embedding_0", index, table, out, 32).bytes == 32 + 64 + 64


def test_a_generated_reduction_has_points_in_two_dimensions():
    x, row = tensor("fp32", 4, 8), tensor("fp32", 4)
    assert work_of("triton_red_fused_sum_0", x, row, 4, 8).bytes == 128 + 16


def test_a_generated_product_is_found_among_what_was_fused_to_it():
    a, b, bias, out = (tensor("bf16", *n) for n in [(2, 3), (3, 5), (5,), (2, 5)])
    assert work_of("triton_tem_fused_addmm_1", bias, a, b, out) == Work(60, 2 * 36, "bf16")
    assert work_of("triton_tem_fused_mm_1", bias, b, b, out) is None


def test_resampling_backward_writes_the_size_of_the_input():
    grad = tensor("fp32", 2, 3, 16, 16)
    work = work_of("aten::upsample_nearest2d_backward", grad, [16, 16], [2, 3, 8, 8], None)
    assert work == Work(1536, 4 * (1536 + 384), "fp32")


def test_the_gradients_of_sampling_are_of_image_and_grid():
    grad, image, grid = tensor("fp32", 1, 2, 3, 3), tensor("fp32", 1, 2, 8, 8), (1, 3, 3, 2)
    rest = [tensor("fp32", *grid), 0, 0, False]
    both = work_of("aten::grid_sampler_2d_backward", grad, image, *rest, [True, True])
    grid_only = work_of("aten::grid_sampler_2d_backward", grad, image, *rest, [False, True])
    assert both.bytes == 4 * (18 + 128 + 18 + 128 + 18)
    assert grid_only.bytes == 4 * (18 + 128 + 18 + 18)


def test_a_generated_convolution_is_recognised_by_its_filter():
    x, weight, out = (
        tensor("bf16", *shape) for shape in ((2, 3, 8, 8), (5, 3, 3, 3), (2, 5, 8, 8))
    )
    work = work_of("triton_tem_fused_convolution_0", x, weight, out)
    assert work.flops == 2 * 640 * 27
    assert work.bytes == 2 * (384 + 135 + 640)


def test_generated_attention_touches_all_of_its_buffers():
    query, row_sums = tensor("bf16", 1, 2, 8, 4), tensor("fp32", 1, 2, 8)
    work = work_of("triton_tem_fused_flex_attention_0", query, query, query, row_sums, query)
    assert (work.flops, work.bytes) == (None, 4 * 128 + 64)
