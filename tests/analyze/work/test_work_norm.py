from kprof.analyze.work import Work
from tests.analyze.calls import tensor, work_of

X, SCALE = tensor("bf16", 2, 3, 8), tensor("bf16", 8)
X_BYTES, SCALE_BYTES, ROWS = 96, 16, 6


def test_layer_norm_reads_and_writes_each_element_once():
    work = work_of("aten::native_layer_norm", X, [8], SCALE, SCALE, 1e-5)
    assert work == Work(8 * 48, 2 * X_BYTES + 2 * SCALE_BYTES + ROWS * 8, "fp32")


def test_layer_norm_without_weights_takes_its_rows_from_the_argument():
    work = work_of("aten::native_layer_norm", X, [3, 8], None, None, 1e-5)
    assert work.bytes == 2 * X_BYTES + 2 * 8


def test_layer_norms_backward_reads_two_tensors_and_writes_one():
    kept = tensor("fp32", 2, 3, 1)
    mask = [True, True, True]
    work = work_of("aten::native_layer_norm_backward", X, X, [8], kept, kept, SCALE, SCALE, mask)
    assert work == Work(12 * 48, 3 * X_BYTES + 2 * 24 + 3 * SCALE_BYTES, "fp32")


def test_rms_norm_keeps_one_number_a_row():
    work = work_of("aten::_fused_rms_norm", X, [8], SCALE, 1e-5)
    assert work == Work(4 * 48, 2 * X_BYTES + SCALE_BYTES + ROWS * 4, "fp32")


def test_rms_norms_backward_makes_one_affine_gradient():
    kept = tensor("fp32", 2, 3, 1)
    work = work_of("aten::_fused_rms_norm_backward", X, X, [8], kept, SCALE, [True, True])
    assert work == Work(9 * 48, 3 * X_BYTES + 24 + 2 * SCALE_BYTES, "fp32")


def test_batch_norm_updates_its_statistics_in_training_only():
    x, channel = tensor("fp32", 4, 2, 5, 5), tensor("fp32", 2)
    arguments = [x, channel, channel, channel, channel]
    learning = work_of("aten::cudnn_batch_norm", *arguments, True, 0.1, 1e-5)
    fixed = work_of("aten::native_batch_norm", *arguments, False, 0.1, 1e-5)
    assert learning == Work(8 * 200, 2 * 800 + 4 * 8 + 2 * 8 + 2 * 8, "fp32")
    assert fixed == Work(4 * 200, 2 * 800 + 4 * 8, "fp32")


def test_batch_norms_backward_reads_two_tensors_and_writes_one():
    x, channel = tensor("fp32", 4, 2, 5, 5), tensor("fp32", 2)
    work = work_of("aten::cudnn_batch_norm_backward", x, x, channel, channel, channel)
    assert work == Work(12 * 200, 3 * 800 + 16 + 3 * 8, "fp32")


def test_group_norm_keeps_statistics_for_each_group():
    x, channel = tensor("fp32", 4, 6, 5), tensor("fp32", 6)
    work = work_of("aten::native_group_norm", x, channel, channel, 4, 6, 5, 3, 1e-5)
    assert work == Work(8 * 120, 2 * 480 + 2 * 24 + 8 * 12, "fp32")


def test_batch_norm_over_several_gpus_is_counted_in_its_parts():
    x, channel = tensor("fp32", 4, 2, 5, 5), tensor("fp32", 2)
    assert work_of("aten::batch_norm_stats", x, 1e-5).bytes == 800
    assert work_of("aten::batch_norm_elemt", x, channel, channel, channel, channel).bytes == 1600
    assert work_of("aten::batch_norm_backward_reduce", x, x, channel, channel).bytes == 1600
    assert work_of("aten::batch_norm_backward_elemt", x, x, channel, channel).bytes == 2400


def test_weight_norm_keeps_its_norms_in_fp32():
    direction, length = tensor("bf16", 4, 6), tensor("bf16", 4, 1)
    forward = work_of("aten::_weight_norm_interface", direction, length, 0)
    assert forward.bytes == 2 * 48 + 8 + 16
    norms = tensor("fp32", 4, 1)
    name = "aten::_weight_norm_interface_backward"
    backward = work_of(name, direction, direction, length, norms, 0)
    assert backward.bytes == 2 * 48 + 8 + 16 + 48 + 8


def test_rows_of_one_element_have_statistics_of_their_own():
    x, scale = tensor("fp32", 4, 1), tensor("fp32", 1)
    work = work_of("aten::native_layer_norm", x, [1], scale, scale, 1e-5)
    assert work.bytes == 4 * (4 + 1 + 1 + 4) + 2 * 4 * 4
