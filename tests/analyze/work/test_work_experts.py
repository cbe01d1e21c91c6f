from kprof.analyze.work import Work
from tests.analyze.calls import tensor, work_of

# 16 experts: 8 hidden, 12 inner of which two halves are multiplied by each other.
FIRST, SECOND = tensor("bf16", 16, 24, 8), tensor("bf16", 16, 8, 12)
MATRIX_BYTES = 2 * (24 * 8 + 8 * 12)
FLOPS_EACH = 2 * (24 * 8 + 8 * 12)


def experts(num_tokens, num_chosen):
    tokens = tensor("bf16", num_tokens, 8)
    weights, choices = (tensor(t, num_tokens, num_chosen) for t in ("fp32", "int32"))
    name = "vllm::outplace_fused_experts"
    return work_of(name, tokens, FIRST, SECOND, weights, choices, "silu")


def test_one_token_meets_as_many_experts_as_it_chooses():
    assert experts(1, 4) == Work(4 * FLOPS_EACH, 2 * 16 + 4 * MATRIX_BYTES + 2 * 16, "bf16")


def test_several_tokens_meet_at_most_as_many_as_all_choose():
    work = experts(3, 4)
    assert work == Work(12 * FLOPS_EACH, 96 + 12 * MATRIX_BYTES + 96, "bf16", "at most")


def test_no_more_experts_are_read_than_there_are():
    assert experts(100, 4).bytes == 2 * 1600 + 16 * MATRIX_BYTES + 2 * 1600


def test_matrices_of_another_width_have_unknown_work():
    tokens, choices = tensor("bf16", 3, 10), tensor("int32", 3, 4)
    name = "vllm::outplace_fused_experts"
    assert work_of(name, tokens, FIRST, SECOND, choices, choices) is None


def test_a_layer_that_records_no_matrices_reads_and_writes_at_least_its_tokens():
    work = work_of("vllm::moe_forward", tensor("bf16", 5, 8), tensor("bf16", 5, 16), "layer")
    assert work == Work(None, 2 * (40 + 80 + 40), bound="at least")


def test_choosing_experts_needs_scores_weights_and_choices():
    weights, choices = tensor("fp32", 5, 2), tensor("int32", 5, 2)
    work = work_of("_moe_C::topk_softmax", weights, choices, tensor("fp32", 5, 16))
    assert work == Work(None, 40 + 40 + 320)
    assert work_of("_moe_C::topk_softmax", weights, choices) is None


def test_sorting_tokens_reads_and_writes_each_choice():
    work = work_of("_moe_C::moe_align_block_size", tensor("int32", 5, 2), 16, 64)
    assert (work.flops, work.bytes) == (None, 2 * 40)


def test_a_single_expert_is_read_once():
    first, second = tensor("bf16", 1, 24, 8), tensor("bf16", 1, 8, 12)
    weights, choices = tensor("fp32", 1, 1), tensor("int32", 1, 1)
    arguments = tensor("bf16", 1, 8), first, second, weights, choices, "silu"
    work = work_of("vllm::outplace_fused_experts", *arguments)
    assert work == Work(FLOPS_EACH, 2 * 16 + MATRIX_BYTES + 2 * 4, "bf16")


def test_two_quantized_numbers_in_an_element_count_as_two():
    tokens, choices = tensor("bf16", 1, 8), tensor("int32", 1, 4)
    packed = tensor("uint8", 16, 24, 4), tensor("uint8", 16, 8, 6)
    name = "vllm::outplace_fused_experts"
    work = work_of(name, tokens, *packed, choices, choices)
    assert work == Work(4 * FLOPS_EACH, 2 * 16 + 4 * (24 * 4 + 8 * 6) + 2 * 16, "uint8")
