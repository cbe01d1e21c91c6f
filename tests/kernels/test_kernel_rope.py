"""Rotary position embedding: numbers, orders in memory, turning back, compilers."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import math

import pytest
import torch

from kprof.errors import KprofError
from kprof.kernels.rope import KERNEL, rope, rope_
from tests.kernels.kernel_checks import (
    COMPILED,
    INTERPRETED,
    Plain,
    are_same,
    compiled,
    errors_against_truth,
    results_of,
    spills_of,
    why_inaccurate,
    why_untrusted,
)

pytestmark = INTERPRETED


def arguments_of(*shape, dtype=torch.float32):
    return KERNEL.inputs(shape, Plain(dtype))


def angles(length, columns):
    """Return the cosines and sines of a Llama, the same for both halves."""
    frequencies = 1e4 ** -(torch.arange(0, columns, 2) / columns)
    turned = torch.outer(torch.arange(float(length)), frequencies)
    both = torch.cat((turned, turned), dim=-1)[None]
    return both.cos(), both.sin()


@pytest.mark.slow
def test_the_gate_trusts_it():
    assert why_untrusted(KERNEL, (2, 1, 2, 1, 6)) == ""


@pytest.mark.slow
def test_it_is_no_less_accurate_than_what_it_replaces():
    assert why_inaccurate(KERNEL, (2, 2, 3, 1, 10), num_values=500) == ""


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 2), (2, 3, 3, 1, 10), (1, 2, 5, 5, 80)])
def test_any_number_of_heads_is_turned_right_with_its_gradients(shape):
    assert errors_against_truth(KERNEL, rope, arguments_of(*shape)) < 1e-6


@pytest.mark.parametrize("width", [2, 6, 10])
@pytest.mark.parametrize("is_in_place", [False, True])
def test_angles_of_the_first_columns_leave_the_others_as_they_are(width, is_in_place):
    q, k, cos, sin = arguments_of(2, 3, 4, 2, 10)
    cos, sin = cos[..., :width], sin[..., :width]
    expected = KERNEL.reference(q, k, cos, sin)
    found = rope_(q.clone(), k.clone(), cos, sin) if is_in_place else rope(q, k, cos, sin)
    torch.testing.assert_close([*found], [*expected])
    assert torch.equal(found[0][..., width:], q[..., width:])


def test_gradients_of_rotated_and_of_other_columns_are_those_of_the_mathematics():
    q, k, cos, sin = arguments_of(2, 3, 4, 2, 10)
    arguments = (q, k, cos[..., :4], sin[..., :4])
    assert errors_against_truth(KERNEL, rope, arguments) < 1e-6


def test_sixteen_bits_are_rounded_as_hugging_face_does():
    arguments = arguments_of(2, 3, 4, 2, 16, dtype=torch.float16)
    found = results_of(rope, arguments, (0, 1))
    assert are_same(found, results_of(KERNEL.reference, arguments, (0, 1)))


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("is_in_place", [False, True])
def test_angles_of_pairs_turn_neighbours(width, is_in_place):
    q, k, cos, sin = arguments_of(2, 3, 4, 2, 8)
    cos, sin = (one[..., :width].unflatten(-1, (-1, 2)) for one in (cos, sin))
    found = rope_(q.clone(), k.clone(), cos, sin) if is_in_place else rope(q, k, cos, sin)
    pair = q[..., 2] * cos[:, None, :, 1, 0] - q[..., 3] * sin[:, None, :, 1, 0]
    torch.testing.assert_close(found[0][..., 2], pair)
    torch.testing.assert_close([*found], [*KERNEL.reference(q, k, cos, sin)])
    assert torch.equal(found[0][..., width:], q[..., width:])


def test_one_angle_of_a_pair_needs_no_copy_and_has_the_gradients_of_the_mathematics():
    q, k, cos, sin = arguments_of(2, 3, 4, 2, 8)
    turns = torch.view_as_complex(torch.stack((cos[..., :4], sin[..., :4]), dim=-1))
    views = [one[..., None].expand(-1, -1, -1, 2) for one in torch.view_as_real(turns).unbind(-1)]
    assert errors_against_truth(KERNEL, rope, (q, k, *views)) < 1e-6
    product = torch.view_as_complex(q.unflatten(-1, (-1, 2)).contiguous()) * turns[:, None]
    torch.testing.assert_close(rope(q, k, *views)[0], torch.view_as_real(product).flatten(-2))


def test_angles_in_float32_round_the_result_alone():
    q, k, cos, sin = arguments_of(2, 3, 4, 2, 16, dtype=torch.float16)
    cos, sin = cos.float() / 3, sin.float() / 3
    wanted = [one.half() for one in KERNEL.reference(q.float(), k.float(), cos, sin)]
    assert are_same(rope(q, k, cos, sin), wanted)
    assert are_same(KERNEL.reference(q, k, cos, sin), wanted)


def test_one_tensor_is_turned_beside_no_heads():
    q, k, cos, sin = arguments_of(2, 3, 4, 2, 8)
    assert are_same(rope(q, k[:, :0], cos, sin)[:1], rope(q, k, cos, sin)[:1])
    assert errors_against_truth(KERNEL, rope, (q, k[:, :0], cos, sin)) < 1e-6


def test_every_sequence_of_the_batch_may_have_its_own_angles():
    q, k, cos, sin = arguments_of(2, 3, 2, 1, 8)
    cos, sin = torch.cat((cos, -cos)), torch.cat((sin, sin))
    found = results_of(rope, (q, k, cos, sin), (0, 1))
    for one, other in zip(
        found, results_of(KERNEL.reference, (q, k, cos, sin), (0, 1)), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_no_angle_turns_nothing():
    q, k, cos, sin = arguments_of(1, 3, 2, 1, 8)
    assert are_same(rope(q, k, torch.ones_like(cos), torch.zeros_like(sin)), [q, k])


def test_a_quarter_turn_swaps_the_halves():
    q, k, cos, sin = arguments_of(1, 3, 2, 1, 8)
    turned, _ = rope(q, k, torch.zeros_like(cos), torch.ones_like(sin))
    assert are_same([turned], [torch.cat((-q[..., 4:], q[..., :4]), dim=-1)])


def test_turning_back_restores():
    q, k, _, _ = arguments_of(1, 5, 2, 1, 8)
    cos, sin = angles(5, 8)
    back = rope(*rope(q, k, cos, sin), cos, -sin)
    for one, other in zip(back, (q, k), strict=True):
        torch.testing.assert_close(one, other)


def test_the_gradient_is_turned_back():
    q, k, _, _ = arguments_of(1, 5, 2, 1, 8)
    cos, sin = angles(5, 8)
    gradient = results_of(lambda q: rope(q, k, cos, sin)[0], (q,), (0,))[1]
    arriving = torch.randn(q.shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(gradient, rope(arriving, k, cos, -sin)[0])


def test_a_turned_query_and_key_depend_on_their_distance_alone():
    q, k, _, _ = arguments_of(1, 1, 1, 1, 8)
    cos, sin = angles(6, 8)
    queries, keys = rope(q.expand(1, 1, 6, 8), k.expand(1, 1, 6, 8), cos, sin)
    scores = (queries @ keys.transpose(-1, -2))[0, 0]
    assert math.isclose(scores[3, 1], scores[5, 3], rel_tol=1e-4)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (3, 2, 1, 0)])
def test_heads_may_lie_in_any_order_in_memory(order):
    q, k, cos, sin = (one.contiguous() for one in arguments_of(2, 3, 4, 2, 8))
    back = tuple(order.index(i) for i in range(4))
    laid = [one.permute(order).contiguous().permute(back) for one in (q, k)]
    found = results_of(rope, (*laid, cos, sin), (0, 1))
    assert are_same(found, results_of(rope, (q, k, cos, sin), (0, 1)))


def test_the_result_lies_in_memory_as_the_query_does():
    q, k, cos, sin = arguments_of(2, 3, 4, 2, 8)
    assert [one.stride() for one in rope(q, k, cos, sin)] == [q.stride(), k.stride()]


def test_parts_of_one_packed_tensor_are_read_where_they_are():
    packed = Plain()(2, 3, 6 * 8).view(2, 3, 6, 8).transpose(1, 2)
    q, k, (cos, sin) = packed[:, :4], packed[:, 4:], angles(3, 8)
    assert are_same(rope(q, k, cos, sin), rope(q.contiguous(), k.contiguous(), cos, sin))


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (3, 2, 1, 0)])
def test_in_place_it_is_the_same(order):
    q, k, cos, sin = arguments_of(2, 3, 4, 2, 8)
    back = tuple(order.index(i) for i in range(4))
    q, k = (one.permute(order).contiguous().permute(back) for one in (q, k))
    expected = rope(q, k, cos, sin)
    returned = rope_(q, k, cos, sin)
    assert returned[0] is q and returned[1] is k
    assert are_same([q, k], expected)


def test_in_place_is_refused_where_a_gradient_is_wanted():
    q, k, cos, sin = arguments_of(1, 1, 1, 1, 2)
    with pytest.raises(KprofError, match="need gradients"):
        rope_(q.requires_grad_(), k, cos, sin)


def test_no_tokens_give_no_tokens():
    q, k, cos, sin = arguments_of(0, 3, 2, 1, 8)
    assert [tuple(one.shape) for one in rope(q, k, cos, sin)] == [(0, 2, 3, 8), (0, 1, 3, 8)]


@COMPILED
@pytest.mark.parametrize("dynamic", [False, True])
def test_it_is_the_same_when_compiled_in_one_graph(dynamic):
    arguments = arguments_of(2, 3, 4, 2, 8)
    again = results_of(compiled(rope, dynamic), arguments, (0, 1))
    assert are_same(again, results_of(rope, arguments, (0, 1)))


@COMPILED
def test_in_place_it_is_the_same_when_compiled():
    q, k, cos, sin = arguments_of(2, 3, 4, 2, 8)
    graph = compiled(lambda q, k: rope_(q * 1, k * 1, cos, sin))
    assert are_same(graph(q, k), rope(q, k, cos, sin))


def test_its_operators_keep_torchs_rules():
    arguments = arguments_of(2, 3, 4, 2, 8)
    torch.library.opcheck(torch.ops.kprof.rope.default, (*arguments, False))
    torch.library.opcheck(torch.ops.kprof.rope_.default, arguments)


def test_what_it_cannot_do_it_refuses():
    q, k, cos, sin = arguments_of(2, 3, 4, 2, 8)
    assert KERNEL.refuses(q, k, cos, sin) is None
    assert "(B, H, S, D)" in KERNEL.refuses(q[0], k, cos, sin)
    assert "fit each other" in KERNEL.refuses(q, k, cos[:, :2], sin[:, :2])
    assert "fit each other" in KERNEL.refuses(q, k[:1], cos, sin)
    assert "dtypes" in KERNEL.refuses(q, k, cos.half(), sin.half())
    assert "dtypes" in KERNEL.refuses(q.half(), k, cos, sin)
    assert KERNEL.refuses(q.half(), k.half(), cos, sin) is None
    assert "no gradients" in KERNEL.refuses(q, k, cos.requires_grad_(), sin)
    assert "odd" in KERNEL.refuses(q[..., :7], k[..., :7], cos[..., :7], sin[..., :7])
    many = torch.zeros(1, 512, 1, 128)
    assert "too many" in KERNEL.refuses(many, many, many[:, 0], many[:, 0])


@pytest.mark.slow
def test_nothing_spills_on_hopper_for_the_default_shapes():
    cases = [((1, 2, 32, 8, 64), "bfloat16"), ((1, 2, 32, 8, 128), "bfloat16")]
    assert spills_of(KERNEL, *cases, ((1, 2, 32, 8, 128), "float32")) == []
