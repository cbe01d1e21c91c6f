"""Operators of torch, registered the cheap way: define and impl, with a fake for the compiler.

`torch.library.custom_op` costs several microseconds a call; this costs the dispatcher alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "kprof"
_library = torch.library.Library(NAMESPACE, "DEF")


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register an operator and return it.

    Args:
        schema: As torch writes it, such as "silu(Tensor x) -> Tensor".
        run: Does it, on CUDA; on a CPU it runs in Triton's interpreter, or not at all.
        fake: Makes outputs of the right shape, from inputs that hold no data.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    for key in ("CUDA", "CPU"):
        _library.impl(name, run, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default
