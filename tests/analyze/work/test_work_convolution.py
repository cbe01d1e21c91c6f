from itertools import product

from kprof.analyze.work import Work
from kprof.analyze.work.convolution import touched_extent
from tests.analyze.calls import tensor, work_of

# 2 images of 3 channels, 8x8; 4 filters of 3x3; padding 1, stride 2: 4x4 positions.
X, WEIGHT = tensor("fp32", 2, 3, 8, 8), tensor("fp32", 4, 3, 3, 3)
FLOPS = 2 * 2 * 16 * 108
BYTES = 4 * (384 + 108 + 2 * 4 * 16)
STRIDE, PADDING, DILATION = [2, 2], [1, 1], [1, 1]


def test_every_weight_meets_every_output_position():
    work = work_of("aten::cudnn_convolution", X, WEIGHT, PADDING, STRIDE, DILATION, 1)
    assert work == Work(FLOPS, BYTES, "fp32")


def test_every_variant_finds_stride_and_padding():
    bias = tensor("fp32", 4)
    rest = [PADDING, STRIDE, DILATION, 1]
    with_bias = Work(FLOPS, BYTES + 16, "fp32")
    assert work_of("aten::miopen_convolution", X, WEIGHT, bias, *rest) == with_bias
    assert work_of("aten::mkldnn_convolution", X, WEIGHT, bias, *rest) == with_bias
    rest = [STRIDE, PADDING, DILATION]
    assert work_of("aten::conv2d", X, WEIGHT, bias, *rest, 1) == with_bias
    assert work_of("aten::convolution", X, WEIGHT, bias, *rest, False, [0, 0], 1) == with_bias
    assert work_of("aten::_conv_depthwise2d", X, WEIGHT, [3, 3], bias, *rest) == with_bias
    assert work_of("aten::_slow_conv2d_forward", X, WEIGHT, [3, 3], bias, *rest[:2]) == with_bias


def test_one_recorded_number_stands_for_all_dimensions():
    assert work_of("aten::cudnn_convolution", X, WEIGHT, [1], [2], [1], 1).flops == FLOPS


def test_groups_shrink_the_weight_and_so_the_work():
    x, weight = tensor("fp32", 2, 4, 8, 8), tensor("fp32", 4, 1, 3, 3)
    work = work_of("aten::cudnn_convolution", x, weight, PADDING, STRIDE, DILATION, 4)
    assert work.flops == 2 * 2 * 16 * 36


def test_dilation_widens_the_filter():
    work = work_of("aten::cudnn_convolution", X, WEIGHT, [0, 0], [1, 1], [2, 2], 1)
    assert work.flops == 2 * 2 * 16 * 108


def test_a_transposed_convolution_starts_from_its_input_positions():
    # 4x4 inputs, stride 2, kernel 2: 8x8 outputs; every input meets all 2*3*4 weights.
    x, weight = tensor("fp32", 1, 2, 4, 4), tensor("fp32", 2, 3, 2, 2)
    arguments = [None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1]
    work = work_of("aten::convolution", x, weight, *arguments)
    assert work == Work(2 * 16 * 24, 4 * (32 + 24 + 3 * 64), "fp32")
    vendor = [[0, 0], [0, 0], [2, 2], [1, 1], 1]
    assert work_of("aten::cudnn_convolution_transpose", x, weight, *vendor) == work


def backward(mask):
    grad = tensor("fp32", 2, 4, 4, 4)
    rest = [[4], STRIDE, PADDING, DILATION, False, [0, 0], 1, mask]
    return work_of("aten::convolution_backward", grad, X, WEIGHT, *rest)


def test_backward_counts_the_gradients_that_were_asked_for():
    grad, x, weight = 4 * 128, 4 * 384, 4 * 108
    assert backward([True, True, False]) == Work(2 * FLOPS, 2 * (grad + x + weight), "fp32")
    assert backward([False, True, False]) == Work(FLOPS, grad + x + weight, "fp32")
    assert backward([True, True, True]).bytes == 2 * (grad + x + weight) + 16
    assert backward([False, False, True]).bytes == grad + 16


def test_without_a_whole_mask_all_gradients_are_counted():
    asked = backward([True, True, True])
    assert [backward(mask) for mask in (None, [], [True, False], 1)] == [asked] * 4


def test_without_a_stride_the_work_is_unknown():
    assert work_of("aten::cudnn_convolution", X, WEIGHT, PADDING) is None


def test_a_filter_narrower_than_its_stride_reads_only_what_it_meets():
    # 1x1 filters of stride 2: 16 of the 64 positions of each channel are read.
    pointwise = tensor("fp32", 4, 3, 1, 1)
    work = work_of("aten::cudnn_convolution", X, pointwise, [0, 0], STRIDE, DILATION, 1)
    assert work.bytes == 4 * (384 // 4 + 12 + 2 * 4 * 16)


def test_the_positions_that_a_convolution_reads_are_those_that_one_can_count():
    for size, kernel, padding, stride, dilation in product(
        range(1, 8), range(1, 4), range(3), range(1, 4), range(1, 5)
    ):
        reach = size + 2 * padding - dilation * (kernel - 1)
        starts = range(-padding, reach - padding, stride)
        read = {start + k * dilation for start in starts for k in range(kernel)}
        counted = len(read & set(range(size)))
        assert touched_extent(size, kernel, padding, stride, dilation) == counted


def test_dilated_filters_read_what_their_taps_meet():
    assert touched_extent(size=8, kernel=2, padding=0, stride=3, dilation=2) == 4
    assert touched_extent(size=8, kernel=3, padding=1, stride=2, dilation=1) == 8
    assert touched_extent(size=9, kernel=3, padding=0, stride=4, dilation=1) == 6
