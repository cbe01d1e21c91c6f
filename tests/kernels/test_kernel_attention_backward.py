"""Gradients of attention: numbers, masks, lengths, sequences, what sees nothing, what compiles."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kprof.kernels.attention._triton as host
import kprof.kernels.attention._hopper_backward as hopper
from kprof.kernels.attention._triton import Options, Schedule
from kprof.kernels.attention._triton import BackwardInputs
from kprof.kernels.attention.attention_forward import KERNEL, attention_forward
from tests.kernels.kernel_checks import (
    COMPILED,
    INTERPRETED,
    are_same,
    compiled,
    errors_of,
    why_inaccurate,
)
from tests.kernels.kernel_hopper import on_hopper
from tests.kernels.kernel_threads import store_permuted

pytestmark = INTERPRETED
CLOSE = 6e-4


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """A GPU's tiles would hold all of these calls."""
    monkeypatch.setattr(host, "forward_schedule", lambda *about: Schedule(32, 16, 4, 2))
    monkeypatch.setattr(host, "dq_schedule", lambda dim: Schedule(32, 16, 4, 2))
    monkeypatch.setattr(host, "dkdv_schedule", lambda dim: Schedule(16, 32, 4, 2))


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def call_of(queries=50, keys=None, batch=1, query_heads=2, heads=1, dim=64):
    keys = queries if keys is None else keys
    return (
        drawn(batch, query_heads, queries, dim),
        drawn(batch, heads, keys, dim, seed=1),
        drawn(batch, heads, keys, dim, seed=2),
    )


def gradients_of(call, dy=None, dlse=None, **options):
    """Return the gradients of a call, for these gradients of its results, or for random ones."""
    call = [one.detach().requires_grad_() for one in call]
    y, lse = attention_forward(*call, **options)
    dy = drawn(*y.shape, seed=3) if dy is None else dy
    if dlse is None:
        return torch.autograd.grad(y, call, dy)
    return torch.autograd.grad((y, lse), call, (dy, dlse))


def expected_of(call, is_causal=True, window=0):
    call = [one.double().requires_grad_() for one in call]
    y = KERNEL.truth(*call, is_causal, window)
    return torch.autograd.grad(y, call, drawn(*y.shape, seed=3).double())


def check(call, **options):
    assert errors_of(gradients_of(call, **options), expected_of(call, **options)) < CLOSE


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("queries", [16, 33, 50])
def test_gradients_are_those_of_the_weighted_mean(queries, is_causal):
    check(call_of(queries), is_causal=is_causal)


def test_one_token_moves_its_value_alone():
    dq, dk, dv = gradients_of(call_of(1, heads=2))
    assert max(dq.abs().max(), dk.abs().max()) < 1e-5
    assert torch.equal(dv, drawn(1, 2, 1, 64, seed=3))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(1, 50), (20, 50), (50, 20)])
def test_queries_are_the_last_ones_where_there_are_more_keys(queries, keys, is_causal):
    check(call_of(queries, keys), is_causal=is_causal)


@pytest.mark.parametrize("dim", [128, 256])
def test_heads_of_every_dimension_are_right(dim):
    check(call_of(20, dim=dim))


@pytest.mark.parametrize(("query_heads", "heads"), [(2, 2), (6, 2), (3, 1)])
def test_keys_get_the_sum_of_what_the_heads_give_that_share_them(query_heads, heads):
    check(call_of(40, query_heads=query_heads, heads=heads))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [2, 17, 40])
def test_a_window_hides_what_is_not_near(window, is_causal):
    check(call_of(70), is_causal=is_causal, window=window)


@pytest.mark.parametrize(("queries", "keys"), [(20, 60), (60, 20)])
def test_a_window_is_about_a_querys_own_key_whatever_the_lengths(queries, keys):
    check(call_of(queries, keys), window=20)


def test_a_query_that_sees_nothing_and_an_unseen_key_get_no_gradient():
    dq, dk, dv = gradients_of(call_of(50, 33))
    assert not dq[:, :, :17].any()
    assert dq[:, :, 18:].any(-1).all()
    assert dk.any(-1).all()
    # The last 20 queries with a window of 5 see no key before 80 - 20 + 1 - 5.
    dq, dk, dv = gradients_of(call_of(20, 80), window=5)
    assert not dk[:, :, :56].any()
    assert not dv[:, :, :56].any()
    assert dv[:, :, 56:].any(-1).all()


@pytest.mark.parametrize("which", ["keys", "queries"])
def test_without_the_one_the_other_gets_nothing(which):
    call = call_of(5, 0) if which == "keys" else call_of(0, 5)
    found = gradients_of(call)
    assert [one.shape for one in found] == [one.shape for one in call]
    assert not any(one.any() for one in found)


def test_scores_may_be_scaled_otherwise():
    call = call_of(40, heads=2)
    found = gradients_of([0.5 * call[0], *call[1:]], scale=0.25)
    expected = list(expected_of(call))
    expected[0] = 2 * expected[0]
    assert errors_of(found, expected) < CLOSE


def test_a_whole_scale_is_a_number_like_others(monkeypatch):
    given = []
    take = lambda *about: given.append(about[5][0])  # noqa: E731
    monkeypatch.setattr("kprof.kernels.attention.attention_forward.attend_with_gradient", take)
    attention_forward(*(one.requires_grad_() for one in call_of(4)), scale=1)
    # What Triton compiles for a 1 that is no float holds for no other scale.
    assert [type(one) for one in given] == [float]


def test_scores_too_large_for_a_power_are_as_near_as_torchs():
    q, k, v = call_of(40, heads=2)
    call = [one.requires_grad_() for one in (4 * q, 4 * k, v)]
    y = KERNEL.reference(*call)
    expected, torchs = expected_of(call), torch.autograd.grad(y, call, drawn(*y.shape, seed=3))
    assert errors_of(gradients_of(call), expected) < 1.05 * errors_of(torchs, expected)


def test_the_log_sum_exp_has_gradients_too():
    call = call_of(40, heads=2)
    dlse = drawn(1, 2, 40, seed=4).float()
    found = gradients_of(call, dlse=dlse)
    exact = [one.double().requires_grad_() for one in call]
    scores = exact[0] @ exact[1].transpose(-1, -2) / 8
    later = torch.ones(40, 40).triu(1).bool()
    lse = scores.masked_fill(later, -math.inf).logsumexp(-1)
    y = KERNEL.truth(*exact)
    dy = drawn(*y.shape, seed=3).double()
    assert errors_of(found, torch.autograd.grad((y, lse), exact, (dy, dlse.double()))) < CLOSE


def test_the_log_sum_exp_may_be_all_that_is_used():
    q, k, v = (one.requires_grad_() for one in call_of(20))
    attention_forward(q, k, v)[1].sum().backward()
    assert q.grad.any()
    assert not v.grad.any()


def test_what_wants_no_gradient_gets_none():
    q, k, v = call_of(20)
    k.requires_grad_()
    attention_forward(q, k, v)[0].float().sum().backward()
    assert (q.grad, v.grad) == (None, None)
    ones = torch.ones(1, 2, 20, 64).half()
    assert are_same([k.grad], [gradients_of((q, k.detach(), v), dy=ones)[1]])


STARTS = (torch.tensor([0, 20, 20, 21, 58]).int(), torch.tensor([0, 20, 35, 66, 78]).int())


def gradients_of_sequences(call, **options):
    starts = {"cu_seqlens_q": STARTS[0], "cu_seqlens_k": STARTS[1]}
    most = {"max_seqlen_q": 37, "max_seqlen_k": 31}
    return gradients_of(call, **starts, **most, **options)


@pytest.mark.parametrize("is_causal", [True, False])
def test_sequences_of_several_lengths_lie_one_after_another(is_causal):
    q, k, v = call_of(queries=60, keys=80, heads=2)
    dy = drawn(*q.shape, seed=3)
    dq, dk, dv = gradients_of_sequences((q, k, v), dy=dy, is_causal=is_causal)
    for i in (0, 2, 3):
        rows, keys = (slice(one[i], one[i + 1]) for one in STARTS)
        alone = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        expected = gradients_of(alone, dy=dy[:, :, rows], is_causal=is_causal)
        assert are_same((dq[:, :, rows], dk[:, :, keys], dv[:, :, keys]), expected)


def test_tokens_of_no_sequence_and_keys_that_no_query_has_get_nothing():
    dq, dk, dv = gradients_of_sequences(call_of(queries=60, keys=80))
    assert not dq[:, :, 58:].any()
    assert not dk[:, :, 20:35].any()
    assert not dv[:, :, 78:].any()


# Of the interpreter's maximum, for queries of which every score is no number.
@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")
def test_nothing_of_the_next_sequence_gets_into_this_one():
    call = call_of(queries=30)
    starts = torch.tensor([0, 9, 30]).int()
    dy = drawn(*call[0].shape, seed=3)
    alone = gradients_of([one[:, :, :9] for one in call], dy=dy[:, :, :9])
    for one in (*call, dy):
        one[:, :, 9:] = math.nan
    found = gradients_of(call, dy=dy, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=21)
    assert are_same([one[:, :, :9] for one in found], alone)


def test_a_sequence_has_the_same_bits_in_every_batch():
    call = call_of(40, batch=3)
    dy = drawn(*call[0].shape, seed=3)
    alone = gradients_of([one[1:2] for one in call], dy=dy[1:2])
    assert are_same([one[1:2] for one in gradients_of(call, dy=dy)], alone)


def test_tensors_may_lie_in_memory_in_any_way():
    call = call_of(20, heads=2)
    expected = gradients_of(call)
    packed = drawn(1, 20, 2, 3 * 64 + 5)
    views = [packed[..., 5 + i * 64 : 69 + i * 64].transpose(1, 2) for i in range(3)]
    for view, x in zip(views, call, strict=True):
        view.copy_(x)
    assert are_same(gradients_of(views), expected)
    turned = [one.transpose(2, 3).contiguous().transpose(2, 3) for one in call]
    dy = drawn(*call[0].shape, seed=3).transpose(1, 2).contiguous().transpose(1, 2)
    assert are_same(gradients_of(turned, dy=dy), expected)


def test_gradients_lie_as_what_they_are_gradients_of():
    call = [one.transpose(1, 2).contiguous().transpose(1, 2) for one in call_of(20)]
    assert [one.stride() for one in gradients_of(call)] == [one.stride() for one in call]


@COMPILED
def test_it_is_the_same_when_compiled_in_one_graph():
    call = call_of(20)
    dy = drawn(*call[0].shape, seed=3)
    expected = gradients_of(call, dy=dy)
    given = [one.requires_grad_() for one in call]
    y = compiled(attention_forward)(*given)[0]
    assert are_same(torch.autograd.grad(y, given, dy), expected)


def test_errors_are_no_larger_than_those_of_torch():
    assert why_inaccurate(KERNEL, (1, 2, 2, 20, 33, 0, 64), ("float16",)) == ""


def test_five_products_are_counted_for_two():
    call = (*call_of(4, heads=2), True, 0)
    assert KERNEL.work(*call).flops == 2 * 4 * 64 * 10
    assert KERNEL.backward_work(*call).flops == 2 * 10 * 64 * 10


def backward_by(monkeypatch, dim, is_ordered=False):
    """Return who computes gradients, and in which order."""
    called = []
    monkeypatch.setattr(hopper, "run_backward", lambda *about: called.append("plain"))
    monkeypatch.setattr(
        hopper, "_launch_backward", lambda *about: called.append(("Hopper", about[-1]))
    )
    q, k, v = call_of(20, dim=dim)
    y, lse = attention_forward(q, k, v)
    given = BackwardInputs(drawn(*y.shape), None, q, k, v, y, lse, None, None)
    hopper.run_backward_on_hopper(given, Options(0.1, True, 0, 20), 20, is_ordered=is_ordered)
    return called


def test_what_the_kernel_for_hopper_does_not_do_plain_triton_does(monkeypatch):
    assert backward_by(monkeypatch, 256) == ["plain"]
    assert backward_by(monkeypatch, 128) == [("Hopper", False)]


def test_who_asked_for_an_order_or_told_torch_so_gets_it(monkeypatch):
    assert backward_by(monkeypatch, 64, is_ordered=True) == [("Hopper", True)]
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert backward_by(monkeypatch, 128) == [("Hopper", True)]


@pytest.mark.parametrize("dim", [64, 128])
def test_sums_are_rounded_with_their_columns_in_order(monkeypatch, dim):
    # Tokens first in memory, as many layers have it.
    q = torch.rand(2, 70, 2, dim).half().transpose(1, 2)
    given = BackwardInputs(*(q for _ in BackwardInputs._fields))._replace(
        cu_seqlens_q=None, cu_seqlens_k=None
    )

    def spread(given, options, prepared, of_keys, is_ordered):
        for place in itertools.product(range(2), range(2), range(0, dim, 64)):
            batch, head, first = place
            columns, smem = slice(first, first + 64), np.zeros((1, 1, 128, 64), np.float32)
            store_permuted(smem[:, :, :64], q[batch, head, :64, columns].float().numpy())
            prepared[2][batch, head, :64, columns] = torch.from_numpy(smem[0, 0, :64])

    monkeypatch.setattr(hopper, "_row_statistics", lambda given: None)
    monkeypatch.setattr(hopper, "_launch_backward", spread)
    dq, _, _ = hopper.run_backward_on_hopper(given, Options(0.5, True, 0, 70), 70, is_ordered=False)
    assert dq.stride() == q.stride()
    assert torch.equal(dq[:, :, :64], 0.5 * q[:, :, :64])
    assert not dq[:, :, 64:].any()


@pytest.mark.parametrize(("dim", "block"), [(64, 128), (128, 64)])
def test_a_block_of_queries_has_its_numbers_side_by_side(dim, block):
    q, k, v = call_of(70, dim=dim)
    y, lse = attention_forward(q, k, v)
    dy, dlse = drawn(*y.shape, seed=3), drawn(*lse.shape, seed=4).float()
    found = hopper._row_statistics(BackwardInputs(dy, dlse, q, k, v, y, lse, None, None))
    assert found.shape == (1, 2, 128 // block, 2 * block)
    numbers = found.unflatten(3, (2, block)).transpose(2, 3).reshape(1, 2, 2, 128)
    delta = (y.float() * dy.float()).sum(-1) - dlse
    torch.testing.assert_close(numbers[:, :, 0, :70], -lse * math.log2(math.e))
    torch.testing.assert_close(numbers[:, :, 1, :70], -delta, rtol=1e-4, atol=1e-4)
    assert not numbers[..., 70:].any()


def test_a_query_that_sees_nothing_gives_nothing_whatever_its_log_sum_exp_gets():
    q, k, v = call_of(50, 33)
    y, lse = attention_forward(q, k, v)
    assert lse[:, :, :17].isneginf().all()
    dlse = torch.zeros_like(lse).index_fill_(2, torch.arange(17), math.nan)
    dy = drawn(*y.shape, seed=3)
    delta = hopper._row_statistics(BackwardInputs(dy, dlse, q, k, v, y, lse, None, None))[
        :, :, 0, 128:
    ]
    assert not delta[..., :17].any()
    assert delta[..., 18:50].all()
    assert not delta.isnan().any()
    found, expected = (gradients_of((q, k, v), dy=dy, dlse=one) for one in (dlse, 0 * lse.exp()))
    assert are_same(found, expected)


def test_a_peer_without_gradients_says_so(monkeypatch):
    peer = SimpleNamespace(flash_attn_func=lambda q, k, v, **options: q.detach())
    monkeypatch.setitem(__import__("sys").modules, "fa3_fwd_interface", peer)
    attend = KERNEL.provider("flash-attn-3").load()
    call = [one.requires_grad_() for one in call_of(4, heads=2)]
    with pytest.raises(NotImplementedError, match="has no gradients"):
        attend(*call)
    with torch.no_grad():
        assert attend(*call).shape == call[0].shape


ON_HOPPER = """
import json, torch
from unittest.mock import patch
from kprof.kernels.bench import ahead
from kprof.kernels.attention.attention_forward import attention_forward
from tests.kernels.kernel_code import product_loops_of

read, found = ahead._read, []

def kept(*given):
    binary = read(*given)
    about = [binary.name, binary.spilled_bytes, binary.shared_bytes]
    found.append([*about, product_loops_of(binary)])
    return binary

calls = [(64, 2, True, 0), (128, 2, True, 0), (256, 2, True, 0), (128, 1, True, 0)]
calls += [(128, 1, False, 0), (128, 2, False, 0), (128, 1, False, 100)]
for dim, group, causal, window in calls:
    q = torch.zeros(1, 4, 300, dim, dtype=torch.bfloat16).requires_grad_()
    k = torch.zeros(1, 4 // group, 300, dim, dtype=torch.bfloat16).requires_grad_()
    with patch.object(ahead, "_read", kept):
        ahead.compile_ahead(
            lambda: attention_forward(q, k, k, is_causal=causal, window=window)[0].sum().backward()
        )
print(json.dumps(found))
"""


@pytest.mark.slow
def test_on_hopper_nothing_spills_and_products_do_not_wait_for_each_other():
    found = json.loads(on_hopper(ON_HOPPER))
    names = {"attention_forward_kernel", "attention_dq_kernel", "attention_dkdv_kernel"}
    assert {name for name, *_ in found} == names
    assert len(found) == 7 * len(names)
    for name, spilled_bytes, shared_bytes, loops in found:
        assert spilled_bytes == 0, name
        assert shared_bytes <= 227 * 1024
        assert len(loops) >= 2
        for loop in loops:
            assert loop["WARPGROUP"] <= 7 < loop["HGMMA"], name
