import pytest

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


def test_an_adaptive_maximum_writes_values_and_places():
    name = "aten::adaptive_max_pool2d"
    assert work_of(name, X, [2, 2]) == Work(384, 4 * 384 + 12 * 24, "fp32")
    unbatched = tensor("fp32", 3, 8, 8)
    assert work_of(name, unbatched, [2, 2]) == Work(192, 4 * 192 + 12 * 12, "fp32")


def test_a_backward_adds_up_as_often_as_the_larger_side_has_elements():
    grad = tensor("fp32", 2, 3, 4, 4)
    assert work_of("aten::_adaptive_avg_pool2d_backward", grad, X).flops == 384
    assert work_of("aten::_adaptive_avg_pool2d_backward", X, grad).flops == 384


def test_padding_widens_the_last_dimension_first_and_on_both_sides():
    # 8 + 1 + 2 columns, 8 + 3 + 4 rows.
    assert work_of("aten::reflection_pad2d", X, [1, 2, 3, 4]) == Work(0, 4 * (384 + 6 * 11 * 15))
    row = tensor("fp32", 8)
    assert work_of("aten::replication_pad1d", row, [1, 2]) == Work(0, 4 * (8 + 11))
    assert work_of("aten::reflection_pad2d", row, [1, 2, 3, 4]) is None


def test_an_image_laid_out_as_columns_has_each_element_of_each_window():
    # Windows of 5 by 3 with the dilation: 6 places down and 3 across, of 9 elements each.
    arguments = [3, 3], [2, 1], [1, 0], [1, 2]
    assert work_of("aten::im2col", X, *arguments) == Work(0, 4 * (384 + 6 * 9 * 18))
    unbatched = tensor("fp32", 3, 8, 8)
    assert work_of("aten::im2col", unbatched, *arguments) == Work(0, 4 * (192 + 3 * 9 * 18))


def test_columns_add_up_to_an_image_of_as_many_channels_as_they_have_windows_worth():
    arguments = [8, 8], [3, 3], [2, 1], [1, 0], [1, 2]
    batch, alone, single = (tensor("fp32", *n) for n in [(2, 27, 18), (27, 18), (2, 3, 64)])
    assert work_of("aten::col2im", batch, *arguments) == Work(972, 4 * (972 + 384), "fp32")
    assert work_of("aten::col2im", alone, *arguments) == Work(486, 4 * (486 + 192), "fp32")
    of_one = [8, 8], [1, 1], [1, 1], [0, 0], [1, 1]
    assert work_of("aten::col2im", single, *of_one) == Work(384, 4 * (384 + 384), "fp32")


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
    # Four neighbours, and of each as much for the image's gradient as for the grid's.
    assert (both.flops, both.dtype) == (16 * 18, "fp32")


@pytest.mark.parametrize(
    ("name", "num_dims", "flops_each"),
    [("grid_sampler_2d", 2, 8), ("cudnn_grid_sampler", 2, 8), ("grid_sampler_3d", 3, 16)],
)
def test_sampling_weighs_the_neighbours_of_each_place(name, num_dims, flops_each):
    image, grid = (
        tensor("fp32", 1, 2, *[8] * num_dims),
        tensor("fp32", 1, *[3] * num_dims, num_dims),
    )
    num_out = 2 * 3**num_dims
    moved = 2 * 8**num_dims + num_dims * 3**num_dims + num_out
    assert work_of(f"aten::{name}", image, grid, 0, 0, False) == Work(
        flops_each * num_out, 4 * moved, "fp32"
    )


def test_the_backward_of_sampling_a_volume_has_eight_neighbours():
    grad, image = tensor("fp32", 1, 2, 3, 3, 3), tensor("fp32", 1, 2, 8, 8, 8)
    grid = tensor("fp32", 1, 3, 3, 3, 3)
    work = work_of("aten::grid_sampler_3d_backward", grad, image, grid, 0, 0, False, [True, True])
    assert work.flops == 32 * 54


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
