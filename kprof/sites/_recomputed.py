"""A tensor that is computed again for gradients, by whoever would else keep it until then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Linear, Module

from kprof.sites._patches import is_passed_over


class _Again(NamedTuple):
    """What stands for the tensor meanwhile."""

    make: Callable[[], Tensor]
    shape: torch.Size


def run_on(layer: Module, make: Callable[[], Tensor]) -> Any:
    """Return layer(make())."""
    return layer(make())


def run_without_keeping(layer: Module, make: Callable[[], Tensor]) -> Any:
    """Return layer(make()); what it keeps of that for gradients is made again for them.

    Where that is not known to be right, or to save anything, it is kept as ever: by a layer other
    than torch's linear one, or one with hooks, which may change what it is given, or where somebody
    else has hooks for what is saved, as gradient checkpointing does.

    Args:
        layer: Which.
        make: Computes what it is given, the same bits every time.
    """
    x = make()
    if not _saves_x(layer):
        return layer(x)
    address, size = x.data_ptr(), x.numel()

    def pack(saved: Tensor) -> Tensor | _Again:
        is_x = saved.data_ptr() == address and saved.numel() == size and saved.is_contiguous()
        return _Again(make, saved.shape) if is_x else saved

    with saved_tensors_hooks(pack, _unpack):
        return layer(x)


def _saves_x(layer: Module) -> bool:
    is_watched = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    is_plain = type(layer).forward is Linear.forward and is_passed_over(layer)
    return torch.is_grad_enabled() and is_plain and not is_watched


def _unpack(packed: Tensor | _Again) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    with torch.no_grad():
        return packed.make().view(packed.shape)
