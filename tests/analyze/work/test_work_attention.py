from dataclasses import replace

import pytest

from kprof.analyze.roofline.operator_work import find_model
from kprof.analyze.work import Work
from tests.analyze.calls import inputs, tensor, work_of

# 2 sequences, 3 heads, 8 positions of size 4: 2*3*8*8 = 384 pairs, 16 FLOPs each.
QKV = [tensor("bf16", 2, 3, 8, 4)] * 3
TENSOR_BYTES = 2 * 2 * 3 * 8 * 4
ROW_SUM_BYTES = 4 * 2 * 3 * 8
FORWARD_BYTES = 4 * TENSOR_BYTES + ROW_SUM_BYTES
NO_BIAS = None


def test_attention_is_two_products():
    work = work_of("aten::_scaled_dot_product_flash_attention", *QKV, 0.0, False, False)
    assert work == Work(384 * 16, FORWARD_BYTES, "bf16")


def test_a_causal_mask_halves_the_square():
    work = work_of("aten::_scaled_dot_product_flash_attention", *QKV, 0.0, True, False)
    assert work == Work(192 * 16, FORWARD_BYTES, "bf16")


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("aten::scaled_dot_product_attention", [NO_BIAS, 0.0, True]),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", [0.0, True, NO_BIAS]),
        ("aten::_scaled_dot_product_efficient_attention", [NO_BIAS, True, 0.0, True]),
        ("aten::_scaled_dot_product_cudnn_attention", [NO_BIAS, True, 0.0, True, False]),
        (
            "aten::_cudnn_attention_forward",
            [NO_BIAS, None, None, 8, 8, True, 0.0, True, False, 0.5],
        ),
    ],
)
def test_every_variant_finds_its_causal_flag(name, rest):
    assert work_of(name, *QKV, *rest).flops == 192 * 16


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("aten::_flash_attention_forward", [None, None, 8, 8, 0.0, True, False, 0.5]),
        ("aten::_efficient_attention_forward", [None, None, None, 8, 8, 0.0, 1]),
        ("flash_attn::_flash_attn_forward", [0.0, 0.5, True, -1, -1, 0.0]),
    ],
)
def test_variants_with_positions_before_heads_find_both(name, rest):
    qkv = [tensor("bf16", 2, 8, 3, 4)] * 3
    assert work_of(name, *qkv, *rest) == Work(192 * 16, FORWARD_BYTES, "bf16")


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        (
            "aten::_scaled_dot_product_flash_attention_backward",
            [*QKV[:1], tensor("fp32", 2, 3, 8), None, None, 8, 8, 0.0, True],
        ),
        (
            "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
            [*QKV[:1], tensor("fp32", 2, 3, 8), 0.0, True],
        ),
        (
            "aten::_scaled_dot_product_efficient_attention_backward",
            [None, *QKV[:1], tensor("fp32", 2, 3, 8), None, None, 0.0, [True] * 4, True],
        ),
        (
            "aten::_cudnn_attention_backward",
            [*QKV[:1], None, None, None, None, None, None, 8, 8, 0.0, True, 0.5],
        ),
    ],
)
def test_backward_is_twice_the_forward_and_moves_gradients_too(name, rest):
    # Read: gradient, q, k, v, result and row sums; written: three gradients.
    work = work_of(name, QKV[0], *QKV, *rest)
    assert work == Work(2 * 192 * 16, 8 * TENSOR_BYTES + ROW_SUM_BYTES, "bf16")


def test_grouped_keys_are_read_once_but_meet_all_queries():
    key = tensor("bf16", 2, 1, 8, 4)
    work = work_of("aten::_scaled_dot_product_flash_attention", QKV[0], key, key, 0.0, False)
    assert work.flops == 384 * 16
    assert work.bytes == 2 * TENSOR_BYTES + 2 * TENSOR_BYTES // 3 + ROW_SUM_BYTES


def test_a_new_token_sees_all_keys_under_a_causal_mask():
    query, key = tensor("bf16", 1, 1, 1, 4), tensor("bf16", 1, 1, 8, 4)
    work = work_of("aten::_scaled_dot_product_flash_attention", query, key, key, 0.0, True)
    assert work.flops == 7 * 16


def test_values_may_be_narrower_than_keys():
    value = tensor("bf16", 2, 3, 8, 2)
    work = work_of("aten::_scaled_dot_product_flash_attention", *QKV[:2], value, 0.0, False)
    assert work.flops == 384 * 2 * (4 + 2)


def test_a_sliding_window_limits_the_pairs():
    qkv = [tensor("bf16", 2, 8, 3, 4)] * 3
    rest = [None, None, 8, 8, 0.0, True, False, 0.5, 1, 0]
    assert work_of("aten::_flash_attention_forward", *qkv, *rest).flops == 2 * 3 * 8 * 2 * 16


def test_an_additive_mask_is_read():
    mask = tensor("bf16", 8, 8)
    name = "aten::_scaled_dot_product_efficient_attention"
    assert work_of(name, *QKV, mask, True, 0.0, False).bytes == FORWARD_BYTES + 128


def test_where_a_causal_mask_was_not_recorded_half_of_the_square_is_the_least():
    _, model = find_model("aten::_scaled_dot_product_flash_attention")
    known = model(inputs(*QKV, 0.0, True))
    unknown = model(replace(inputs(*QKV, 0.0, True), values=()))
    assert unknown == replace(known, bound="at least")
