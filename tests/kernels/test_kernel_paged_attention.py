"""Decode attention in pages as a kernel of the gate: its calls, and the faults they find."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

from dataclasses import replace
from functools import partial

import pytest
import torch

from kprof.kernels.correctness import Case
from kprof.kernels.correctness.numerics import check_numerics
from kprof.kernels.correctness.observe import draw
from kprof.kernels.bench.measure import subject_of
from kprof.kernels.decode_attention.paged_attention import KERNEL
from tests.kernels.kernel_checks import INTERPRETED, errors_of

pytestmark = INTERPRETED
FP8 = torch.float8_e4m3fn
IN_16_BITS = (3, 8, 2, 1, 100, 64, 16, 0, 0)
IN_FP8 = (3, 8, 2, 1, 100, 64, 16, 0, 1)


def call_of(shape, dtype="float16"):
    return draw(subject_of(KERNEL), Case(shape, dtype))


def truth_of(call):
    q, k, v, lengths, table, k_scale, v_scale, window = call
    scales = [None if one is None else one.double() for one in (k_scale, v_scale)]
    wide = (one.double() for one in (q, k, v))
    if k.dtype == FP8:
        wide = (q.double(), k, v)
    return KERNEL.truth(*wide, lengths, table, *scales, window)


@pytest.mark.parametrize("provider", ["kprof", "kprof-invariant", "eager"])
@pytest.mark.parametrize("shape", KERNEL.edges)
def test_every_edge_is_right(shape, provider):
    call = call_of(shape)
    found = KERNEL.provider(provider).load()(*call)
    assert errors_of([found.nan_to_num(0.0)], [truth_of(call)]) < 2e-3


def test_truth_is_attention_over_pages_that_are_read_one_by_one():
    q, k, v, lengths, table, k_scale, v_scale, _ = call = call_of(IN_FP8)
    found = truth_of(call)
    length, head = int(lengths[0]), 1
    places = [(int(table[0, i // 16]), i % 16) for i in range(length)]
    keys, values = (
        torch.stack([cache[page, head, at].double() for page, at in places]) * scale[head].double()
        for cache, scale in ((k, k_scale), (v, v_scale))
    )
    weights = torch.softmax(keys @ q[0, 5, 0].double() / 8, 0)
    torch.testing.assert_close(found[0, 5, 0], weights @ values, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [IN_16_BITS, IN_FP8])
def test_pages_are_shuffled_and_the_last_sequence_is_empty(shape):
    _, k, _, lengths, table, *_ = call_of(shape)
    assert len(set(table.flatten().tolist())) == table.numel() == k.shape[0] - 1
    assert table.flatten().diff().lt(0).any()
    assert lengths[-1] == 0
    assert any(n % 16 for n in lengths.tolist())
    assert (lengths <= 16 * (table.shape[1] - 1)).any()


@pytest.mark.parametrize("is_fp8", [0, 1])
@pytest.mark.parametrize("provider", ["kprof", "eager"])
def test_of_no_sequence_there_are_no_results(provider, is_fp8):
    call = call_of((0, 8, 2, 1, 300, 64, 16, 0, is_fp8))
    assert KERNEL.provider(provider).load()(*call).shape == (0, 8, 1, 64)


def test_pages_in_fp8_keep_the_values_that_were_drawn_with_a_scale_for_each_head():
    _, wide, *_ = call_of(IN_16_BITS)
    _, k, _, _, _, k_scale, v_scale, _ = call_of(IN_FP8)
    assert (k.dtype, k_scale.shape, k_scale.dtype) == (FP8, (2,), torch.float32)
    assert k_scale[0] != k_scale[1] != v_scale[1]
    back = k.float() * k_scale[:, None, None]
    torch.testing.assert_close(back, wide.float(), rtol=0.07, atol=0.01)


def test_edges_have_pages_of_both_sorts_several_tokens_windows_and_an_empty_sequence():
    sorts = {shape[-1] for shape in KERNEL.edges}
    assert sorts == {0, 1}
    for sort in sorts:
        edges = [shape for shape in KERNEL.edges if shape[-1] == sort]
        assert any(shape[3] > 1 for shape in edges)
        assert any(shape[7] for shape in edges)
        assert any(shape[4] % shape[6] for shape in edges)
    assert {shape[-1] for shape in KERNEL.shapes} == {0, 1}


def of_the_next_page(call, *given):
    q, k, v, lengths, table, *others = given
    return call(q, k, v, lengths, (table + 1) % k.shape[0], *others)


def with_the_scales_of_other_heads(call, *given):
    *first, k_scale, v_scale, window = given
    scales = (None if one is None else one.flip(0) for one in (k_scale, v_scale))
    return call(*first, *scales, window)


def without_lengths(call, *given):
    q, k, v, lengths, table, *others = given
    return call(
        q, k, v, lengths.new_full(lengths.shape, table.shape[1] * k.shape[2]), table, *others
    )


def one_key_short(call, *given):
    q, k, v, lengths, *others = given
    return call(q, k, v, (lengths - 1).clamp(min=0), *others)


def without_a_window(call, *given):
    return call(*given[:-1], 0)


FOUND = [
    *((of_the_next_page, shape) for shape in (IN_16_BITS, IN_FP8)),
    *((without_lengths, shape) for shape in (IN_16_BITS, IN_FP8)),
    *((one_key_short, shape) for shape in (IN_16_BITS, IN_FP8)),
    (with_the_scales_of_other_heads, IN_FP8),
    (without_a_window, (3, 4, 1, 3, 70, 128, 32, 50, 0)),
    (without_a_window, (3, 6, 2, 2, 75, 64, 16, 33, 1)),
]


@pytest.mark.parametrize(("fault", "shape"), FOUND)
def test_a_call_of_the_gate_tells_a_fault_from_rounding(fault, shape):
    call, ours = call_of(shape), KERNEL.provider("kprof").load()
    found = fault(ours, *call).nan_to_num(0.0)
    assert errors_of([found], [truth_of(call)]) > 0.02


@pytest.mark.slow
def test_the_gate_passes_it_and_finds_scales_of_other_heads():
    ours = KERNEL.provider("kprof").load()
    few = {"distributions": ("normal",), "num_values": 20_000}
    subject = replace(subject_of(KERNEL), shapes=(IN_FP8,), dtypes=("float16",), **few)
    assert check_numerics(subject).state == "passed"
    faulty = partial(with_the_scales_of_other_heads, ours)
    assert check_numerics(replace(subject, new=faulty)).state == "failed"


def test_what_it_reads_is_counted_in_the_bytes_of_the_cache_and_within_the_window():
    wide, narrow = (KERNEL.work(*call_of(shape)) for shape in (IN_16_BITS, IN_FP8))
    of_queries = 2 * 3 * 8 * 64 * 2
    assert wide.bytes - of_queries == 2 * 3 * 2 * 112 * 64 * 2
    assert narrow.bytes - of_queries == 2 * 3 * 2 * 112 * 64
    assert KERNEL.work(*call_of((3, 8, 2, 1, 100, 64, 16, 32, 1))).flops == 4 * 3 * 8 * 64 * 32


def test_what_it_cannot_do_it_refuses():
    call = call_of(IN_FP8)
    assert KERNEL.refuses(*call) is None
    q, k, v, lengths, table, *scales = call
    assert "scales of keys" in KERNEL.refuses(q, k.half(), v.half(), lengths, table, *scales)
    assert str(tuple(table[:1].shape)) in KERNEL.refuses(q, k, v, lengths, table[:1], *scales)
    assert "gradients" in KERNEL.refuses(q.requires_grad_(), *call[1:])
