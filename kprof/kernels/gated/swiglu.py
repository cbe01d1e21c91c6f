"""SwiGLU, silu(gate) * up: two reads and one write; backward three reads and two writes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kprof.kernels import OURS, Kernel, Provider
from kprof.kernels.gated._unit import gated, why_not, work_of


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up, silu rounded before the product as Hugging Face does.

    Args:
        gate: (..., N), or without up (..., 2N), the gate first; float32, float16 or bfloat16.
        up: (..., N), of the same dtype. Rows may lie apart, as in one packed tensor.
    """
    return gated(gate, up, "silu")


def _reference(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Do what the MLP of a Llama, or of a Phi-3, of Hugging Face does."""
    gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
    return torch.nn.functional.silu(gate) * up


def _truth(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate) * up


def _liger() -> Any:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply


KERNEL = Kernel(
    name="swiglu",
    replaces="silu(gate) * up in the MLPs of Hugging Face's Llama, Qwen, Mistral and Phi-3",
    reference=_reference,
    truth=_truth,
    providers=(
        Provider(OURS, lambda: swiglu, "kprof"),
        Provider("eager", lambda: _reference),
        Provider("inductor", lambda: torch.compile(_reference, dynamic=False)),
        Provider("liger", _liger, "liger-kernel"),
    ),
    refuses=why_not,
    inputs=lambda shape, draw: (draw(*shape), draw(*shape)),
    work=partial(work_of, 3, 5),
    shapes=((8_192, 8_192), (8_192, 14_336), (16_384, 11_008), (4_096, 28_672)),
    edges=((5, 127), (3, 4_097), (2, 16_384)),
    free=(0, 1),
    reach=(2**20,),
    differentiable=(0, 1),
    backward_work=partial(work_of, 5, 11),
    rows=(0, 1),
    sources=(
        "Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202",
        "transformers, LlamaMLP: the order in which it rounds",
    ),
)
