"""GeGLU, gelu(gate) * up: two reads and one write; backward three reads and two writes."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from kprof.kernels import OURS, Kernel, Provider
from kprof.kernels.gated._unit import gated, why_not, work_of

Approximation = Literal["tanh", "none"]


def geglu(gate: Tensor, up: Tensor | None = None, approximate: Approximation = "tanh") -> Tensor:
    """Return gelu(gate) * up, gelu rounded before the product as Hugging Face does.

    Args:
        gate: (..., N), or without up (..., 2N), the gate first; float32, float16 or bfloat16.
        up: (..., N), of the same dtype. Rows may lie apart, as in one packed tensor.
        approximate: As of torch's gelu: "tanh" (Gemma), or "none" for the error function.
    """
    return gated(gate, up, "gelu_tanh" if approximate == "tanh" else "gelu")


def _reference(
    gate: Tensor, up: Tensor | None = None, approximate: Approximation = "tanh"
) -> Tensor:
    """Do what the MLP of a Gemma of Hugging Face does."""
    gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


def _truth(gate: Tensor, up: Tensor, approximate: Approximation = "tanh") -> Tensor:
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


def _liger() -> Any:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    # It knows the approximation by tanh alone.
    return LigerGELUMulFunction.apply


KERNEL = Kernel(
    name="geglu",
    replaces="gelu(gate) * up in the MLPs of Hugging Face's Gemma and T5",
    reference=_reference,
    truth=_truth,
    providers=(
        Provider(OURS, lambda: geglu, "kprof"),
        Provider("eager", lambda: _reference),
        Provider("inductor", lambda: torch.compile(_reference, dynamic=False)),
        Provider("liger", _liger, "liger-kernel"),
    ),
    refuses=why_not,
    inputs=lambda shape, draw: (draw(*shape), draw(*shape)),
    work=partial(work_of, 3, 10),
    shapes=((8_192, 8_192), (8_192, 14_336), (8_192, 24_576)),
    edges=((5, 127), (3, 4_097), (2, 16_384)),
    free=(0, 1),
    reach=(2**20,),
    differentiable=(0, 1),
    backward_work=partial(work_of, 5, 20),
    rows=(0, 1),
    sources=(
        "Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202",
        "transformers, GemmaMLP: the order in which it rounds",
    ),
)
