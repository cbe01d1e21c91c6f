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


def test_every_softmax_takes_five_flops_an_element_and_its_gradient_four():
    x, mask = tensor("fp32", 3, 4, 5), tensor("bool", 3, 4, 5)
    forward = {
        "_softmax": (x, -1, False),
        "_log_softmax": (x, -1, False),
        "_safe_softmax": (x, -1, None),
        "_masked_softmax": (x, mask, -1, None),
    }
    backward = {
        "_softmax_backward_data": (x, x, -1, 6),
        "_log_softmax_backward_data": (x, x, -1, 6),
        "_masked_softmax_backward": (x, x, mask, -1),
    }
    found = {n: work_of(f"aten::{n}", *given) for n, given in (forward | backward).items()}
    assert {n: work.flops for n, work in found.items()} == {
        **dict.fromkeys(forward, 5 * 60),
        **dict.fromkeys(backward, 4 * 60),
    }
    of_mask = {n: 60 for n in found if "masked" in n}
    assert {n: work.bytes for n, work in found.items()} == {
        **{n: 2 * 240 + of_mask.get(n, 0) for n in forward},
        **{n: 3 * 240 + of_mask.get(n, 0) for n in backward},
    }


def test_losses_take_their_flops_for_each_element_forward_and_backward():
    x, grad = tensor("fp32", 3, 4, 5), tensor("fp32")
    each = {"soft_margin": 3, "mse": 3, "smooth_l1": 3, "huber": 3}
    found = {name: work_of(f"aten::{name}_loss", x, x, 1).flops for name in each}
    assert found == {name: flops * 60 for name, flops in each.items()}
    assert work_of("aten::binary_cross_entropy", x, x, None, 1).flops == 6 * 60
    for name, flops in {"mse_loss": 3, "smooth_l1_loss": 3, "huber_loss": 3}.items():
        assert work_of(f"aten::{name}_backward", grad, x, x, 1).flops == flops * 60
    assert work_of("aten::binary_cross_entropy_backward", grad, x, x, None, 1).flops == 6 * 60
