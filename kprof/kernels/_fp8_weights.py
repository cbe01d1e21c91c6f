"""Weights in FP8: quantised once for each version of a parameter, and kept as long as it lives."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from kprof.kernels.quantize_fp8 import quantize_fp8

T = TypeVar("T")


class _Kept(NamedTuple):
    """A weight in FP8, and what shows that it is still that weight."""

    weight: weakref.ref[Tensor]
    version: int
    address: int
    values: Tensor
    scales: Tensor

    def is_of(self, weight: Tensor) -> bool:
        """Tell whether it is this weight as it is now."""
        marks = weight._version, weight.data_ptr()
        return self.weight() is weight and marks == (self.version, self.address)

    def has_room_for(self, weight: Tensor) -> bool:
        """Tell whether it is of this weight, as that was or is."""
        is_alike = (self.values.shape, self.values.device) == (weight.shape, weight.device)
        return is_alike and self.weight() is weight


# No version of any weight.
NONE = -1
# By identity: to compare tensors takes a kernel, and torch's own dictionary several microseconds.
_kept: dict[int, _Kept] = {}


def quantized(weight: Tensor, *, is_kept: bool) -> tuple[Tensor, Tensor]:
    """Return a weight of shape (N, K) in FP8, and its scales, one for each row.

    A new version is put where the last one was: a captured graph reads from there.

    Args:
        weight: As it is; what is written into it counts as a new version, unless it is written
            past torch's counting, through `.data`: then `forget` it.
        is_kept: Whether to keep the result for the next call with this version. Where gradients
            are recorded it must not be, as some optimizers write past the counting, too; what was
            kept before does not count any more then.
    """
    key = id(weight)
    known = _kept.get(key)
    if not is_kept or weight.is_inference() or _are_gathered():
        _let_go(key)
        return quantize_fp8(weight.detach())
    if known is not None and known.is_of(weight):
        return known.values, known.scales
    # What is made while a graph is captured holds nothing until a replay.
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        return quantize_fp8(weight.detach())
    if known is not None and known.has_room_for(weight):
        values, scales = quantize_fp8(weight.detach())
        values, scales = known.values.copy_(values), known.scales.copy_(scales)
    else:
        values, scales = _quantized_to_stay(weight)
    # Once for each version: the next call may be on any stream, and waits for none.
    _wait_for(weight)
    mark = weakref.ref(weight, lambda _: _kept.pop(key, None))
    _kept[key] = _Kept(mark, weight._version, weight.data_ptr(), values, scales)
    return values, scales


def _quantized_to_stay(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return what outlives a CUDA graph's pool, which this thread's memory may be coming from."""
    _wait_for(weight)
    with ThreadPoolExecutor(1) as other:
        return other.submit(_quantized_here, weight.detach()).result()


def _quantized_here(weight: Tensor) -> tuple[Tensor, Tensor]:
    # A new thread has no CUDA context to launch in before CUDA's runtime has been asked something.
    if weight.is_cuda:
        torch.cuda.set_device(weight.device)
    _wait_for(weight)
    # What a thread turns on is off in a new one: modes of torch, and another current stream.
    with torch.no_grad():
        values, scales = quantize_fp8(weight)
    _wait_for(weight)
    return values, scales


def _are_gathered() -> bool:
    """Tell whether FSDP2 is in use: it puts new weights where the last were, uncounted."""
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return sharded is not None and bool(sharded.__subclasses__())


def _wait_for(weight: Tensor) -> None:
    if weight.is_cuda:
        torch.cuda.current_stream(weight.device).synchronize()


def forget(module: torch.nn.Module | None = None) -> None:
    """Quantise a module's parameters anew when they are met next, or all."""
    keys = list(_kept) if module is None else [id(one) for one in module.parameters()]
    for key in keys:
        _let_go(key)


def _let_go(key: int) -> None:
    known = _kept.get(key)
    if known is not None:
        _kept[key] = known._replace(version=NONE)


def of_version(make: Callable[[Tensor], T]) -> Callable[[Tensor], T]:
    """Return `make` of a weight, called once for each version of it: peers' ways to keep weights.

    What is made while a graph is captured, or of a weight without versions, is not kept.
    """
    kept = WeakIdKeyDictionary()

    def made(weight: Tensor) -> T:
        is_passing = weight.is_cuda and torch.cuda.is_current_stream_capturing()
        if weight.is_inference() or is_passing:
            return make(weight.detach())
        mark = weight._version, weight.data_ptr()
        known: tuple[object, T] | None = kept.get(weight)
        if known is None or known[0] != mark:
            kept[weight] = known = mark, make(weight.detach())
        return known[1]

    return made
