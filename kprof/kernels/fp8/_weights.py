"""Weights in FP8: made once for each version of a parameter, and kept as long as it lives."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kprof.kernels.fp8.quantize_fp8 import quantize_fp8

T = TypeVar("T")
# No version of any weight.
NONE = -1


@dataclass(frozen=True)
class _Kept(Generic[T]):
    """What was made of a weight, and what shows that it is still that weight."""

    weight: weakref.ref[Tensor]
    version: int
    address: int
    sort: tuple[object, ...]
    made: T

    def is_of(self, weight: Tensor) -> bool:
        """Tell whether it is of this weight as it is now."""
        is_same = self.weight() is weight
        return is_same and (self.version, self.address) == (weight._version, weight.data_ptr())

    def has_room_for(self, weight: Tensor) -> bool:
        """Tell whether it is of this weight, as that was or is."""
        return self.weight() is weight and self.sort == _sort_of(weight)


def _sort_of(weight: Tensor) -> tuple[object, ...]:
    return weight.shape, weight.dtype, weight.device


class ByVersion(Generic[T]):
    """Makes something of a weight once for each version of it, and keeps that.

    In every call it makes it anew of a tensor made in inference mode, which counts no versions; of
    all where FSDP2 gathers weights, uncounted; and what is met first while a graph is captured, as
    that holds nothing until a replay.
    """

    _all: ClassVar[weakref.WeakSet[ByVersion[Any]]] = weakref.WeakSet()

    def __init__(self, make: Callable[[Tensor], T]) -> None:
        """Take what makes a tensor of a weight, or several."""
        self._make = make
        # By identity: to compare tensors takes a kernel, and torch's own dictionary microseconds.
        self._kept: dict[int, _Kept[T]] = {}
        self._all.add(self)

    def __call__(self, weight: Tensor, *, is_kept: bool = True) -> T:
        """Return what is made of a weight.

        A new version is put where the last one was: a captured graph reads from there.

        Args:
            weight: As it is; what is written into it counts as a new version, unless it is written
                past torch's counting, through `.data`: then `forget` it.
            is_kept: Whether to keep the result for the next call with this version. Where gradients
                are recorded it must not be, as some optimizers write past the counting, too; what
                was kept before does not count any more then.
        """
        is_kept = is_kept and not _are_gathered()
        known = self._kept.get(id(weight))
        # Looked up first: what is kept already is as good in a capture as elsewhere.
        if is_kept and known is not None and known.is_of(weight):
            return known.made
        if not is_kept:
            self.let_go(id(weight))
        if not is_kept or weight.is_inference() or _is_captured(weight):
            return self._make(weight.detach())
        return self._keep(weight, known)

    def _keep(self, weight: Tensor, known: _Kept[T] | None) -> T:
        if known is not None and known.has_room_for(weight):
            made, fresh = known.made, self._make(weight.detach())
            for place, values in zip(tree_leaves(made), tree_leaves(fresh), strict=True):
                place.copy_(values)
        else:
            made = _made_to_stay(self._make, weight)
        # Once for each version: the next call may be on any stream, and waits for none.
        _wait_for(weight)
        key, kept = id(weight), self._kept
        mark = weakref.ref(weight, lambda _: kept.pop(key, None))
        kept[key] = _Kept(mark, weight._version, weight.data_ptr(), _sort_of(weight), made)
        return made

    def let_go(self, key: int | None = None) -> None:
        """Make anew of the weight with this identity, or of all, when it is met next."""
        for one in list(self._kept) if key is None else [key]:
            known = self._kept.get(one)
            if known is not None:
                self._kept[one] = replace(known, version=NONE)


def _is_captured(weight: Tensor) -> bool:
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def _made_to_stay(make: Callable[[Tensor], T], weight: Tensor) -> T:
    """Return what outlives a CUDA graph's pool, which this thread's memory may be coming from."""
    _wait_for(weight)
    with ThreadPoolExecutor(1) as other:
        return other.submit(_made_here, make, weight.detach()).result()


def _made_here(make: Callable[[Tensor], T], weight: Tensor) -> T:
    # A new thread has no CUDA context to launch in before CUDA's runtime has been asked something.
    if weight.is_cuda:
        torch.cuda.set_device(weight.device)
    _wait_for(weight)
    # What a thread turns on is off in a new one: modes of torch, and another current stream.
    with torch.no_grad():
        made = make(weight)
    _wait_for(weight)
    return made


def _are_gathered() -> bool:
    """Tell whether FSDP2 is in use: it puts new weights where the last were, uncounted."""
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return sharded is not None and bool(sharded.__subclasses__())


def _wait_for(weight: Tensor) -> None:
    if weight.is_cuda:
        torch.cuda.current_stream(weight.device).synchronize()


def forget(module: torch.nn.Module | None = None) -> None:
    """Make anew of a module's parameters when they are met next, or of all: ours and peers'."""
    keys = [None] if module is None else [id(one) for one in module.parameters()]
    for made in list(ByVersion._all):
        for key in keys:
            made.let_go(key)


# Of a weight (N, K): its values in FP8, and its scales, one for each row.
quantized = ByVersion(quantize_fp8)
