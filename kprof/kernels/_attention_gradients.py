"""Attention of many queries with its gradients, as torch's autograd wants them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kprof.kernels._attention import run_attention
from kprof.kernels._attention_back import run_attention_back
from kprof.kernels._attention_back_ring import (
    run_attention_back_in_order,
    run_attention_back_on_hopper,
)
from kprof.kernels._attention_ring import run_on_hopper
from kprof.kernels._operator import applied


class _WithGradient(torch.autograd.Function):
    """The operators, outside the dispatcher, where that costs least."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_starts: Tensor | None,
        k_starts: Tensor | None,
        options: tuple[Any, ...],
        most_keys: int,
        is_for_hopper: bool,
        is_ordered: bool,
    ) -> tuple[Tensor, Tensor]:
        run = run_on_hopper if is_for_hopper else run_attention
        y, lse = run(q, k, v, q_starts, k_starts, *options)
        ctx.save_for_backward(q, k, v, y, lse, q_starts, k_starts)
        ctx.set_materialize_grads(False)
        ctx.options = (*options, most_keys)
        on_hopper = run_attention_back_in_order if is_ordered else run_attention_back_on_hopper
        ctx.run_back = on_hopper if is_for_hopper else run_attention_back
        return y, lse

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        y = ctx.saved_tensors[3]
        dy = torch.zeros_like(y) if dy is None else dy
        gradients = ctx.run_back(dy, dlse, *ctx.saved_tensors, *ctx.options)
        return *gradients, None, None, None, None, None, None


attend_with_gradient = applied(_WithGradient)
