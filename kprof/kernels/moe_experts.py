"""Experts of a mixture: each token goes through K of E gated MLPs, whose results are weighted.

    y[t] = sum over k of weight[t, k] * down[e] (act(gate[e] x[t]) * up[e] x[t]),  e = index[t, k]

x and y are (T, H), index and weight (T, K), gate_up (E, 2N, H) with the gates first, and down
(E, H, N). An index of E or more is no expert: it adds nothing.

Rows are sorted by expert, so that torch's grouped GEMM multiplies all of them in one launch. The
kernels here do the rest: one writes each token's row to its K places, one adds up the K weighted
results of a token, one has the gradients of both factors. Each is one pass over the sorted rows.
In plain torch this takes eight passes, and the gradients of its indexing sort again.

In names of tensors T is tokens, K experts of a token, S = T * K sorted rows, H columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from kprof.kernels import OURS, Kernel, Provider, Work
from kprof.kernels.gated import geglu, swiglu
from kprof.kernels.runtime import (
    Launcher,
    alignments,
    applied,
    define,
    kind_of,
    next_power_of_two,
)

# Columns of a block, and of a warp: two loads of 16 bytes per thread in 16 bits.
MOST_COLUMNS, COLUMNS_PER_WARP = 2_048, 512
# Grouped GEMMs take rows at multiples of so many bytes.
ROW_ALIGNMENT = 16
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


def moe_experts(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str = "silu",
) -> Tensor:
    """Return the weighted sum of each token's experts.

    Args:
        x: (T, H) in bfloat16.
        index: (T, K), experts of each token.
        weight: (T, K), their weights; bfloat16 or float32.
        gate_up: (E, 2N, H), the gates first.
        down: (E, H, N).
        activation: "silu", "gelu_tanh" or "gelu".
    """
    slot, ends = _sorted(index, gate_up.shape[0])
    rows = _gathered(x, slot, index, gate_up.shape[0])
    hidden = _activated(_grouped_linear(rows, gate_up, ends), activation)
    results = _grouped_linear(hidden, down, ends)
    return _combined(results, weight, slot, index, gate_up.shape[0])


def _sorted(index: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the place of each row in the order of experts, and where each expert's rows end."""
    by_expert, order = torch.sort(index.reshape(-1), stable=True)
    slot = torch.empty_like(order)
    slot[order] = torch.arange(order.shape[0], device=order.device)
    all_experts = torch.arange(experts, device=index.device, dtype=by_expert.dtype)
    ends = torch.searchsorted(by_expert, all_experts, right=True, out_int32=True)
    return slot.view(index.shape), ends


def _activated(packed: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return swiglu(packed)
    return geglu(packed, None, "tanh" if activation == "gelu_tanh" else "none")


def _grouped_linear(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return each expert's linear layer of its rows; rows of no expert are undefined."""
    if rows.is_cuda:
        multiply = getattr(functional, "grouped_mm", None) or torch._grouped_mm
        product: Tensor = multiply(_aligned(rows), _aligned(weights).transpose(-2, -1), offs=ends)
        return product
    starts = [0, *ends.tolist()]
    parts = [
        functional.linear(rows[first:last], one)
        for first, last, one in zip(starts, starts[1:], weights, strict=False)
    ]
    return torch.cat([*parts, rows.new_zeros(rows.shape[0] - starts[-1], weights.shape[1])])


def _aligned(x: Tensor) -> Tensor:
    """Return a tensor as a grouped GEMM takes it: its rows begin at multiples of 16 bytes."""
    if torch.compiler.is_compiling():
        return x
    begins = (x.data_ptr(), *(x.element_size() * step for step in x.stride() if step != 1))
    is_aligned = all(one % ROW_ALIGNMENT == 0 for one in begins)
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)


class _Gathered(torch.autograd.Function):
    """Each token's row, at its places in the order of experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slot: Tensor, index: Tensor, experts: int) -> Tensor:
        ctx.save_for_backward(slot, index)
        ctx.experts = experts
        return _operator_gather(x, slot)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        slot, index = ctx.saved_tensors
        gradient = gradient.contiguous()
        return _operator_combine(gradient, None, slot, index, ctx.experts), None, None, None


class _Combined(torch.autograd.Function):
    """The weighted sum of the results of each token."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, slot: Tensor, index: Tensor, experts: int
    ) -> Tensor:
        rows = rows.contiguous()
        ctx.save_for_backward(rows, weight, slot, index)
        ctx.experts = experts
        return _operator_combine(rows, weight, slot, index, experts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        rows, weight, slot, index = ctx.saved_tensors
        given = (gradient.contiguous(), rows, weight, slot, index)
        of_rows, of_weight = _operator_backward(*given, ctx.experts)
        return of_rows, of_weight, None, None, None


def _shape_of(columns: int) -> tuple[int, int, dict[str, int]]:
    """Return the columns of a block, the number of blocks, and Triton's options."""
    block = min(MOST_COLUMNS, next_power_of_two(columns))
    return block, -(-columns // block), {"num_warps": max(1, block // COLUMNS_PER_WARP)}


def _run_gather(x: Tensor, slot: Tensor) -> Tensor:
    x, slot = x.contiguous(), slot.contiguous()
    rows = x.new_empty(slot.numel(), x.shape[1])
    call, tensors = kind_of(x, slot), (x, slot, rows)
    if _launch_gather.again(call, tensors) or not rows.numel():
        return rows
    columns, experts = x.shape[1], slot.shape[1]
    block, blocks, options = _shape_of(columns)
    arguments = (*tensors, columns, blocks, experts, block)
    key = (x.device, x.dtype, slot.dtype, experts, block, alignments((x, rows), columns))
    grid = slot.shape[0] * blocks
    _launch_gather(key, grid, arguments, options, call=call, tensors=tensors)
    return rows


def _run_combine(
    rows: Tensor, weight: Tensor | None, slot: Tensor, index: Tensor, experts: int
) -> Tensor:
    weight = None if weight is None else weight.contiguous()
    slot, index = slot.contiguous(), index.contiguous()
    num_tokens, chosen = slot.shape
    columns = rows.shape[1]
    y = rows.new_empty(num_tokens, columns)
    call, tensors = (kind_of(rows, weight, slot, index), experts), (rows, weight, slot, index, y)
    if _launch_combine.again(call, tensors) or not y.numel():
        return y
    block, blocks, options = _shape_of(columns)
    rounds = weight is not None and weight.dtype == rows.dtype
    arguments = (*tensors, columns, blocks, experts, weight is not None, rounds, chosen, block)
    dtypes = (rows.dtype, None if weight is None else weight.dtype, slot.dtype, index.dtype)
    aligned = alignments((rows, weight, slot, index, y), columns)
    key = (rows.device, dtypes, chosen, block, aligned)
    _launch_combine(key, num_tokens * blocks, arguments, options, call=call, tensors=tensors)
    return y


def _run_backward(
    gradient: Tensor, rows: Tensor, weight: Tensor, slot: Tensor, index: Tensor, experts: int
) -> list[Tensor]:
    weight, slot, index = weight.contiguous(), slot.contiguous(), index.contiguous()
    of_rows, of_weight = torch.empty_like(rows), torch.empty_like(weight)
    tensors = (gradient, rows, weight, slot, index, of_rows, of_weight)
    call = (kind_of(*tensors[:-2]), experts)
    if _launch_backward.again(call, tensors) or not of_rows.numel():
        return [of_rows, of_weight]
    columns, chosen = rows.shape[1], slot.shape[1]
    block, _, options = _shape_of(columns)
    arguments = (*tensors, columns, experts, chosen, block)
    dtypes = (rows.dtype, weight.dtype, slot.dtype, index.dtype)
    key = (rows.device, dtypes, chosen, block, alignments(tensors, columns))
    _launch_backward(key, slot.numel(), arguments, options, call=call, tensors=tensors)
    return [of_rows, of_weight]


@triton.jit(do_not_specialize=["blocks"])
def moe_gather(x_TH, slot_TK, rows_SH, columns, blocks, K: tl.constexpr, BLOCK: tl.constexpr):
    """Write a block of a token's row to its places."""
    token = (tl.program_id(0) // blocks).to(tl.int64)
    places = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = places < columns
    x = tl.load(x_TH + token * columns + places, mask)
    for k in range(K):
        slot = tl.load(slot_TK + token * K + k).to(tl.int64)
        tl.store(rows_SH + slot * columns + places, x, mask)


@triton.jit(do_not_specialize=["blocks", "experts"])
def moe_combine(
    rows_SH,
    weight_TK,
    slot_TK,
    index_TK,
    y_TH,
    columns,
    blocks,
    experts,
    HAS_WEIGHT: tl.constexpr,
    ROUNDS: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a block of the sum of a token's rows, in float32, weighted or not."""
    token = (tl.program_id(0) // blocks).to(tl.int64)
    places = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(K):
        slot = tl.load(slot_TK + token * K + k).to(tl.int64)
        mask = (places < columns) & (tl.load(index_TK + token * K + k) < experts)
        row = tl.load(rows_SH + slot * columns + places, mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            weight = tl.load(weight_TK + token * K + k).to(tl.float32)
            # Rows that do not count are 0, whatever their weight.
            row = tl.where(mask, row * weight, 0.0)
            if ROUNDS:
                row = row.to(rows_SH.dtype.element_ty).to(tl.float32)
        total += row
    tl.store(y_TH + token * columns + places, total.to(y_TH.dtype.element_ty), places < columns)


@triton.jit(do_not_specialize=["experts"])
def moe_combine_backward(
    dy_TH,
    rows_SH,
    weight_TK,
    slot_TK,
    index_TK,
    drows_SH,
    dweight_TK,
    columns,
    experts,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradients of one row and of its weight."""
    entry = tl.program_id(0).to(tl.int64)
    token = entry // K
    slot = tl.load(slot_TK + entry).to(tl.int64)
    counts = tl.load(index_TK + entry) < experts
    weight = tl.load(weight_TK + entry).to(tl.float32)
    products = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        places = first + tl.arange(0, BLOCK)
        mask = places < columns
        dy = tl.load(dy_TH + token * columns + places, mask & counts, other=0.0).to(tl.float32)
        row = tl.load(rows_SH + slot * columns + places, mask & counts, other=0.0).to(tl.float32)
        products += dy * row
        drow = tl.where(counts, dy * weight, 0.0).to(drows_SH.dtype.element_ty)
        tl.store(drows_SH + slot * columns + places, drow, mask)
    dweight = tl.sum(products, 0)
    tl.store(dweight_TK + entry, dweight.to(dweight_TK.dtype.element_ty))


_gathered, _combined = applied(_Gathered), applied(_Combined)
_launch_gather = Launcher(moe_gather)
_launch_combine = Launcher(moe_combine)
_launch_backward = Launcher(moe_combine_backward)
_operator_gather = define(
    "moe_gather(Tensor x, Tensor slot) -> Tensor",
    _run_gather,
    lambda x, slot: x.new_empty(slot.numel(), x.shape[1]),
)
_operator_combine = define(
    "moe_combine(Tensor rows, Tensor? weight, Tensor slot, Tensor index, int experts) -> Tensor",
    _run_combine,
    lambda rows, weight, slot, index, experts: rows.new_empty(slot.shape[0], rows.shape[1]),
)
_operator_backward = define(
    "moe_combine_backward(Tensor dy, Tensor rows, Tensor weight, Tensor slot, Tensor index, "
    "int experts) -> Tensor[]",
    _run_backward,
    lambda dy, rows, weight, *others: [torch.empty_like(rows), torch.empty_like(weight)],
)


def _apply(activation: str, gate: Tensor) -> Tensor:
    if activation == "silu":
        return functional.silu(gate)
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


def _reference(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str = "silu",
) -> Tensor:
    """Compute what transformers does with its grouped GEMM, one expert after the other."""
    wide = torch.promote_types(x.dtype, weight.dtype)
    results = x.new_zeros(*index.shape, x.shape[1], dtype=wide)
    for expert in range(gate_up.shape[0]):
        token, place = torch.where(index == expert)
        gate, up = functional.linear(x[token], gate_up[expert]).chunk(2, dim=-1)
        hidden = functional.linear(_apply(activation, gate) * up, down[expert])
        weighted = hidden * weight[token, place, None]
        results = results.index_put((token, place), weighted)
    return results.sum(dim=1).to(x.dtype)


def _grouped_mm(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str = "silu",
) -> Tensor:
    """Do the same by the grouped GEMM and plain operators."""
    slot, ends = _sorted(index, gate_up.shape[0])
    order = torch.empty_like(slot.view(-1))
    order[slot.view(-1)] = torch.arange(order.shape[0], device=order.device)
    is_none = (index.reshape(-1)[order] >= gate_up.shape[0]).unsqueeze(-1)
    rows = x[order // index.shape[1]].masked_fill(is_none, 0.0)
    gate, up = _grouped_linear(rows, gate_up, ends).masked_fill(is_none, 0.0).chunk(2, dim=-1)
    results = _grouped_linear(_apply(activation, gate) * up, down, ends).masked_fill(is_none, 0.0)
    weighted = results * weight.reshape(-1)[order].unsqueeze(-1)
    return weighted[slot.view(-1)].view(*index.shape, x.shape[1]).sum(dim=1).to(x.dtype)


def _refuses(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str = "silu",
) -> str | None:
    if x.dim() != 2 or index.shape != weight.shape or index.dim() != 2:
        return f"tokens {tuple(x.shape)}, index {tuple(index.shape)}, not of two dimensions each"
    if any(one.dtype != torch.bfloat16 for one in (x, gate_up, down)):
        return f"{x.dtype} by {gate_up.dtype}, not bfloat16"
    if weight.dtype not in (torch.bfloat16, torch.float32):
        return f"weights of experts in {weight.dtype}, neither bfloat16 nor float32"
    experts, packed, columns = gate_up.shape
    if down.shape != (experts, columns, packed // 2) or x.shape[1] != columns or packed % 2:
        return f"tokens {tuple(x.shape)}, {tuple(gate_up.shape)} and {tuple(down.shape)}"
    step = ROW_ALIGNMENT // x.element_size()
    if columns % step or (packed // 2) % step:
        return f"{columns} or {packed // 2} columns, not multiples of {step}"
    return None if activation in ACTIVATIONS else f"activation {activation}"


def _work(x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, *_: Any) -> Work:
    num_rows, (experts, packed, columns) = index.numel(), gate_up.shape
    used = min(experts, num_rows)
    weights = used * (gate_up[0].numel() + down[0].numel()) if num_rows else 0
    num_bytes = (2 * x.numel() + weights) * x.element_size()
    num_bytes += index.numel() * index.element_size() + weight.numel() * weight.element_size()
    return Work(3 * num_rows * packed * columns, num_bytes)


def _backward_work(*arguments: Any) -> Work:
    forward = _work(*arguments)
    return Work(2 * forward.flops, 2 * forward.bytes)


def _inputs(shape: tuple[int, ...], draw: Any) -> tuple[Any, ...]:
    tokens, columns, hidden, experts, chosen = shape
    return (
        draw(tokens, columns),
        draw.integers(experts, tokens, chosen),
        draw.plain(tokens, chosen, scale=0.1, shift=1 / max(chosen, 1)),
        draw.plain(experts, 2 * hidden, columns, scale=max(columns, 1) ** -0.5),
        draw.plain(experts, columns, hidden, scale=max(hidden, 1) ** -0.5),
    )


KERNEL = Kernel(
    name="moe_experts",
    replaces="the experts of a mixture in Hugging Face's Mixtral, Qwen3-MoE, OLMoE and DeepSeek",
    reference=_reference,
    truth=_reference,
    providers=(
        Provider(OURS, lambda: moe_experts, "kprof", is_varying=True),
        Provider("grouped-mm", lambda: _grouped_mm, is_varying=True),
        Provider("eager", lambda: _reference, is_varying=True),
    ),
    refuses=_refuses,
    inputs=_inputs,
    work=_work,
    shapes=(
        (8_192, 2_048, 768, 128, 8),
        (4_096, 2_048, 1_024, 64, 8),
        (8_192, 1_024, 512, 32, 8),
    ),
    edges=((5, 24, 40, 3, 2), (33, 16, 8, 7, 1)),
    reach=(2**17,),
    dtypes=("bfloat16",),
    differentiable=(0, 2, 3, 4),
    backward_work=_backward_work,
    rows=(0, 1, 2),
    exact=4,
    sources=(
        "Gale and others, MegaBlocks: Efficient Sparse Training with Mixture-of-Experts, "
        "arXiv 2211.15841",
        "transformers, grouped_mm_experts_forward: the order in which it rounds",
    ),
)
