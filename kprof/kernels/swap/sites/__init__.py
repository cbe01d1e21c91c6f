"""Call sites: the places of a model where a kernel can run, one module per family of them.

Every public module of this folder holds one `FAMILY`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kprof.kernels.swap.site import Request, Site, Skip

    Find = Callable[[object, Request], Iterator[Site | Skip]]

# Modules by the kernels that they find call sites for: a swap imports no others. They are asked in
# this order; `function_calls` takes what the others leave.
FAMILIES = {
    "activations": ("gelu", "relu_squared"),
    "decoders": ("decode",),
    "experts": ("moe_experts",),
    "mlps": ("swiglu", "geglu"),
    "group_norms": ("group_norm_silu",),
    "heads": ("linear_cross_entropy",),
    "linears": ("fp8_linear",),
    "casts": ("cast_weights",),
    "losses": ("cross_entropy",),
    "norms": ("rmsnorm", "layernorm"),
    "optimizers": ("adamw",),
    "residuals": ("add_rmsnorm", "add_layernorm"),
    "biases": ("bias_gelu",),
    "function_calls": (
        *("attention_forward", "attention_fp8", "cross_entropy", "decode_attention"),
        *("layernorm", "rmsnorm", "rope"),
    ),
    # Patches layers in which no function is replaced.
    "readers": ("rmsnorm", "layernorm", "gelu"),
}


@dataclass(frozen=True)
class Family:
    """Call sites of one sort: for which kernels, and how they are found."""

    kernels: tuple[str, ...]
    find: Find
    """Yields the call sites below a module, an optimizer or another root, and those left out."""


def families_of(kernels: Iterable[str]) -> list[Family]:
    """Return the families that find call sites for one of these kernels; imports them."""
    asked = set(kernels)
    names = [name for name, found in FAMILIES.items() if asked.intersection(found)]
    return [import_module(f"{__name__}.{name}").FAMILY for name in names]
