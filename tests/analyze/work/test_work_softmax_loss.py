from kprof.analyze.work import Work
from tests.analyze.calls import tensor, work_of

X = tensor("bf16", 4, 10)


def test_softmax_reads_and_writes_each_element_once():
    assert work_of("aten::_softmax", X, -1, False) == Work(200, 160, "fp32")


def test_softmax_may_write_floats():
    assert work_of("aten::_log_softmax", X, -1, True).bytes == 80 + 160


def test_softmax_backward_writes_the_inputs_type():
    wide = tensor("fp32", 4, 10)
    number_of_bf16, number_of_fp32 = 15, 6
    name = "aten::_log_softmax_backward_data"
    assert work_of(name, wide, wide, -1, number_of_fp32) == Work(160, 480, "fp32")
    assert work_of(name, wide, wide, -1, number_of_bf16).bytes == 320 + 80


def test_a_masked_softmax_reads_its_mask():
    assert work_of("aten::_masked_softmax", X, tensor("bool", 4, 10), -1).bytes == 200


def test_picking_the_targets_scores_reads_no_others():
    target = tensor("int64", 4)
    mean, each = 1, 0
    assert work_of("aten::nll_loss_forward", X, target, None, mean, -100).bytes == 32 + 8 + 2
    assert work_of("aten::nll_loss_forward", X, target, None, each, -100).bytes == 32 + 8 + 8


def test_its_backward_writes_one_gradient_a_target():
    work = work_of("aten::nll_loss_backward", tensor("bf16"), X, tensor("int64", 4), None, 1, -100)
    assert work == Work(4, 2 + 32 + 8, "fp32")


def test_a_squared_error_reads_both_tensors():
    assert work_of("aten::mse_loss", X, X, 1) == Work(120, 162, "fp32")
    assert work_of("aten::mse_loss", X, X, 0).bytes == 240
    assert work_of("aten::mse_loss_backward", tensor("bf16"), X, X, 1).bytes == 2 + 240


def test_the_gradient_of_a_masked_softmax_reads_the_mask():
    x, mask = tensor("fp32", 4, 6), tensor("bool", 4, 6)
    assert work_of("aten::_masked_softmax_backward", x, x, mask, 1).bytes == 3 * 96 + 24


def test_what_a_ctc_loss_reads_is_its_least_work():
    scores, targets = tensor("fp32", 9, 2, 5), tensor("int64", 2, 4)
    work = work_of("aten::_ctc_loss", scores, targets, [9, 9], [4, 4], 0, False)
    assert (work.bytes, work.bound) == (360 + 64, "at least")
