"""Work of mixtures of experts: each token meets the matrices of the experts chosen for it.

How many distinct experts a batch of tokens chooses is not recorded. Their matrices are counted as
if all choices were distinct, as far as there are experts: exact for one token, else at most.
"""

from __future__ import annotations

import math
from dataclasses import replace

from kprof.analyze.work import Inputs, Model, Work, at_least


def _whole_layer(inputs: Inputs) -> Work | None:
    """Model a layer that records its tokens and scores only: both read, as many tokens written."""
    tokens, scores = inputs.tensor(0), inputs.tensor(1)
    if tokens is None or scores is None:
        return None
    return at_least(Work(None, tokens.bytes + scores.bytes + tokens.written_as()))


def _experts(inputs: Inputs) -> Work | None:
    """Model both products of every chosen expert; the choices come after their weights.

    Tokens (tokens, hidden), first matrices (experts, inner, hidden), second (experts, hidden,
    inner); between the two the first product's halves may be multiplied by each other.
    """
    tokens, first, second, choices = (inputs.tensor(i) for i in (0, 1, 2, 4))
    if tokens is None or first is None or second is None or choices is None:
        return None
    if len(tokens.shape) != 2 or len(first.shape) != 3 or len(second.shape) != 3:
        return None
    num_tokens, hidden = tokens.shape
    # Two quantized numbers may share an element along the inner dimensions.
    packed = 2 if first.shape[2] * 2 == hidden else 1
    if first.shape[2] * packed != hidden or second.shape[1] != hidden:
        return None
    flops = 2 * choices.numel * packed * (math.prod(first.shape[1:]) + math.prod(second.shape[1:]))
    num_used = min(first.shape[0], choices.numel)
    matrices = (first.bytes + second.bytes) * num_used // max(first.shape[0], 1)
    moved = tokens.bytes + tokens.written_as() + matrices + 2 * choices.bytes
    work = Work(flops, moved, tokens.dtype if packed == 1 else first.dtype)
    return work if num_tokens <= 1 else replace(work, bound="at most")


def _choose(inputs: Inputs) -> Work | None:
    """Model choosing experts: scores read; weights, choices (and their places) written."""
    tensors = inputs.tensors()
    return Work(None, sum(t.bytes for t in tensors)) if len(tensors) >= 3 else None


def _add_up(inputs: Inputs) -> Work | None:
    """Model adding up what the experts of each token gave."""
    x, out = inputs.tensor(0), inputs.tensor(1)
    return None if x is None or out is None else Work(x.numel, x.bytes + out.written_as(), "fp32")


def _sort_tokens(inputs: Inputs) -> Work | None:
    """Model putting the choices in the order of the experts: at least they are read and written."""
    choices = inputs.tensor(0)
    return None if choices is None else at_least(Work(None, 2 * choices.bytes))


MODELS: dict[str, Model] = {
    "vllm::moe_forward": _whole_layer,
    "vllm::moe_forward_shared": _whole_layer,
    "vllm::inplace_fused_experts": _experts,
    "vllm::outplace_fused_experts": _experts,
    "vllm::rocm_aiter_fused_moe": _experts,
    "sglang::inplace_fused_experts": _experts,
    "sglang::outplace_fused_experts": _experts,
    "_moe_C::topk_softmax": _choose,
    "_moe_C::topk_sigmoid": _choose,
    "sgl_kernel::topk_softmax": _choose,
    "sgl_kernel::topk_sigmoid": _choose,
    "_moe_C::moe_sum": _add_up,
    "sgl_kernel::moe_sum": _add_up,
    "sgl_kernel::moe_sum_reduce": _add_up,
    "_moe_C::moe_align_block_size": _sort_tokens,
    "sgl_kernel::moe_align_block_size": _sort_tokens,
}
