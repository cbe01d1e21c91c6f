import pytest

from kprof.analyze.work import Work
from kprof.analyze.work.packed_attention import count_pairs
from tests.analyze.calls import tensor, work_of

# 16 positions of 2 sequences, 3 heads of size 4.
PACKED, STARTS = tensor("bf16", 16, 3, 4), tensor("int32", 3)
TENSOR_BYTES, ROW_SUM_BYTES = 2 * 16 * 3 * 4, 4 * 16 * 3
# Of two sequences of 8: 8 * 8 pairs each, of 3 heads, 2 * (4 + 4) FLOPs each.
FLOPS = 2 * 64 * 3 * 16


def flash(longest, *, is_causal, query=PACKED, key=PACKED):
    rest = [STARTS, STARTS, longest, longest, 0.0, is_causal, False]
    return work_of("aten::_flash_attention_forward", query, key, key, *rest)


def test_sequences_that_must_be_as_long_as_the_longest_have_exact_work():
    moved = 4 * TENSOR_BYTES + ROW_SUM_BYTES
    assert flash(8, is_causal=False) == Work(FLOPS, moved, "bf16")
    assert flash(8, is_causal=True) == Work(FLOPS // 2, moved, "bf16")


def test_sequences_of_unknown_lengths_need_at_least_what_equal_ones_do():
    work = flash(15, is_causal=False)
    assert work == Work(FLOPS, 4 * TENSOR_BYTES + ROW_SUM_BYTES, "bf16", "at least")


def test_the_bound_holds_for_lengths_that_differ():
    pairs, bound = count_pairs((16, 16), (15, 15), 2, is_causal=False)
    assert pairs <= 15 * 15 + 1 * 1
    assert bound == "at least"


def test_one_sequence_is_no_bound():
    assert count_pairs((16, 16), None, 1, is_causal=False) == (256, None)


def test_keys_of_other_sequences_are_seen_once_at_least():
    assert count_pairs((16, 90), (15, 80), 2, is_causal=False) == (16, "at least")


def test_the_gradients_are_twice_the_products():
    rest = [STARTS, STARTS, 8, 8, 0.0, True, None, None]
    row_sums = tensor("fp32", 3, 16)
    call = [PACKED] * 5 + [row_sums, *rest]
    work = work_of("aten::_flash_attention_backward", *call)
    assert work == Work(FLOPS, 8 * TENSOR_BYTES + ROW_SUM_BYTES, "bf16")


def test_tensors_with_a_batch_of_one_are_packed_where_starts_are_given():
    packed = tensor("bf16", 1, 16, 3, 4)
    rest = [None, STARTS, STARTS, 8, 8, 0.0, 1]
    work = work_of("aten::_efficient_attention_forward", packed, packed, packed, *rest)
    assert (work.flops, work.bound) == (FLOPS // 2, None)


def test_without_starts_every_sequence_of_the_batch_is_whole():
    dense = tensor("bf16", 2, 8, 3, 4)
    rest = [None, None, 8, 8, 0.0, False, False]
    work = work_of("aten::_flash_attention_forward", dense, dense, dense, *rest)
    assert (work.flops, work.bound) == (FLOPS, None)


def test_a_window_leaves_at_least_each_query_itself():
    rest = [STARTS, STARTS, 8, 8, 0.0, True, False, 0.5, 2, 0]
    work = work_of("aten::_flash_attention_forward", PACKED, PACKED, PACKED, *rest)
    assert (work.flops, work.bound) == (16 * 3 * 16, "at least")


def test_attention_to_a_cache_reads_its_tensors_and_each_query_sees_itself():
    query, key, out = tensor("bf16", 5, 8, 4), tensor("bf16", 5, 2, 4), tensor("bf16", 5, 8, 4)
    work = work_of("vllm::unified_attention_with_output", query, key, key, out, "layer")
    assert work == Work(4 * 160, 2 * (160 + 40 + 40 + 160), "bf16", "at least")


@pytest.mark.parametrize("shape", [(16, 3), (2, 8, 3, 4)])
def test_tensors_that_are_not_packed_have_unknown_work(shape):
    given = tensor("bf16", *shape)
    rest = [STARTS, STARTS, 8, 8, 0.0, 0.5, True]
    assert work_of("flash_attn::_flash_attn_varlen_forward", *[given] * 3, *rest) is None


def third(query, key, *, starts=None, lengths=None):
    rest = [None] * 4 + [starts, starts, None, None, lengths, 8, 8, None, *[None] * 8, 0.5, True]
    return work_of("flash_attn_3::fwd", query, key, key, *rest, -1, -1)


def test_the_third_generation_takes_dense_and_packed_sequences():
    dense = tensor("bf16", 2, 8, 3, 4)
    assert third(dense, dense).flops == FLOPS // 2
    assert third(PACKED, PACKED, starts=STARTS).flops == FLOPS // 2


def test_its_keys_in_a_cache_are_of_unknown_length():
    query, cache = tensor("bf16", 2, 1, 3, 4), tensor("bf16", 100, 16, 3, 4)
    work = third(query, cache, lengths=tensor("int32", 2))
    assert work == Work(4 * 24, 2 * 48, "bf16", "at least")


def test_pages_are_no_batch():
    query, pages = tensor("bf16", 2, 8, 3, 4), tensor("bf16", 100, 16, 3, 4)
    rest = [None, None, 8, 8, 0.0, False, False]
    assert work_of("aten::_flash_attention_forward", query, pages, pages, *rest) is None
